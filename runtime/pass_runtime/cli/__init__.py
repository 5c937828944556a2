"""pass-run: the command line of the runtime."""
