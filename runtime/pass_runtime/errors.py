"""The one exception that commands turn into a line on stderr and exit status 2, and a check that raises it."""

import os


class PassError(Exception):
    """An error that the caller can mend. Its message is one line and says what to do next."""


def check_process(owner: int) -> None:
    """Raises PassError in a fork of the process `owner`, which opened a session: its threads are not in the fork."""
    if os.getpid() != owner:
        raise PassError("this session belongs to the process that this one was forked from; load the bundle here")
