"""Defines `PassError`, which commands report in one line, with exit status 2."""

import copyreg
from typing import Any, NoReturn


class PassError(Exception):
    """An error that the caller can fix. Its message is one line and says what to do next."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default pickle calls the constructor with `args`; those of subclasses take others.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class OfOneProcess:
    """The base of what has threads, child processes or memory of an engine: it can be neither
    pickled nor copied."""

    def __reduce__(self) -> NoReturn:
        raise PassError(
            f"a {type(self).__name__} can be neither pickled nor copied: load the bundle in each "
            "process, and send prompts, options and results"
        )


FORKED = "this session was opened before the process was forked; load the bundle in this process"
"""The message of errors in a forked process, which has none of the session's threads."""
