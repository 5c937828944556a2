"""What goes wrong in work that has to go on: it is logged, once in a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("pass_runtime.serve")
EVERY_SECONDS = 60.0


class Troubles:
    """Of one thread's work, which may fail fifty times a second."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    @contextmanager
    def told(self) -> Iterator[None]:
        """Nothing that fails inside gets out."""
        try:
            yield
        except Exception as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + EVERY_SECONDS
                log.error("looking after requests failed; it goes on", exc_info=error)
