"""Defines `PassError`, which commands report in one line, with exit status 2."""


class PassError(Exception):
    """An error that the caller can fix. Its message is one line and says what to do next."""


FORKED = "this session was opened before the process was forked; load the bundle in this process"
"""The message of errors in a forked process, which has none of the session's threads."""
