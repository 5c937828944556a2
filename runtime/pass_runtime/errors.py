import copyreg
from typing import Any, NoReturn


class PassError(Exception):
    """An error that the caller can fix. Its message is one line and says what to do next."""

    def __reduce__(self) -> tuple[Any, ...]:
        # constructors of subclasses take other arguments than `args`
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class OfOneProcess:
    """Has threads, child processes or memory of an engine."""

    def __reduce__(self) -> NoReturn:
        raise PassError(
            f"a {type(self).__name__} can be neither pickled nor copied: load the bundle in each "
            "process, and send prompts, options and results"
        )


FORKED = "this session was opened before the process was forked; load the bundle in this process"
