"""How commands and scripts start and end: they handle signals, and report errors in one line."""
