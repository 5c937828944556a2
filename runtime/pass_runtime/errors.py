"""The one exception that commands turn into a line on stderr and exit status 2."""


class PassError(Exception):
    """Something the caller can mend. The message is one line and says what to do next."""
