"""Starts commands. While they import, a signal ends the process at once: an exception could
print a traceback. So nothing slow is imported here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import import_module
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
SHOW_CURSOR = b"\x1b[?25h"
"""A progress display hides it."""

Handler = Callable[[int, FrameType | None], object]


def run(module: str) -> None:
    """Import `module` and call its `main`, a click command."""
    handle_signals(quit_at_once)
    main = import_module(module).main
    try:
        main()
    finally:
        # only Python's shutdown can be interrupted now
        handle_signals(_quit_silently)


def handle_signals(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def quit_at_once(_number: int, _frame: FrameType | None) -> None:
    """Flush nothing: the signal may have interrupted a write."""
    try:
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _quit_silently(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
