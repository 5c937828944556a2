"""An OpenAI-compatible HTTP server over a session: `app.make_app` builds the ASGI app, `server.py` runs it."""
