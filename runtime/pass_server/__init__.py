"""An OpenAI-compatible HTTP server that decodes with a `pass_runtime.Session`. `app.make_app` makes
the app, and `server.py` runs it."""
