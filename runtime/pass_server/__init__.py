"""An OpenAI-compatible HTTP server of a `pass_runtime.Session`: `app.make_app` makes the app,
`server.py` runs it."""
