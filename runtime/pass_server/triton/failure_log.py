"""Work that has to go on whatever fails in it: failures are logged, at most one a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("pass_server")
EVERY_SECONDS = 60.0


class FailureLog:
    """For the work of one thread, which may fail fifty times a second."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    @contextmanager
    def logged(self) -> Iterator[None]:
        """An exception that is raised inside is logged and goes no further."""
        try:
            yield
        except Exception as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + EVERY_SECONDS
                log.error("looking after requests failed; it goes on", exc_info=error)
