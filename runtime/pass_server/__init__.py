"""An OpenAI-compatible HTTP server over a session. `app.make_app(session, options)` is all of it but the listening."""
