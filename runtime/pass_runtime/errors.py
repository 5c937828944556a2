"""PassError, which commands report in one line with exit status 2, and a check for forks."""

import os


class PassError(Exception):
    """An error that the caller can fix. Its message is one line and says what to do next."""


def check_process(pid: int) -> None:
    """Raise PassError unless this is the process `pid`, which opened the session: a fork of that
    process has none of the session's threads."""
    if os.getpid() != pid:
        raise PassError(
            "this session was opened before the process was forked; load the bundle in this process"
        )
