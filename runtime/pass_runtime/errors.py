"""The one exception that commands turn into a line on stderr and exit status 2."""


class PassError(Exception):
    """An error that the caller can mend. Its message is one line and says what to do next."""
