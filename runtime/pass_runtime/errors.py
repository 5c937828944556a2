"""PassError, of which commands make a line on stderr and exit status 2, and a check for forks."""

import os


class PassError(Exception):
    """An error that the caller can fix. Its message is one line and says what to do next."""


def check_process(pid: int) -> None:
    """Raise PassError if this is not the process `pid`, which opened the session: a fork has none
    of its threads."""
    if os.getpid() != pid:
        raise PassError(
            "this session was opened before the process was forked; load the bundle in this process"
        )
