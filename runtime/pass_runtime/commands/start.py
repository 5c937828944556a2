"""Starts pass-run, pass-export and pass-train, so that a signal ends them with one line.

Importing ONNX Runtime or torch takes a while, and an exception that a signal handler raises in the
middle of an import can print a traceback. Until a command begins its work there is nothing to save
or remove, so a signal ends the process at once. Commands import this module first, so it imports
nothing that takes time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from importlib import import_module
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
"""The exit status of a command that a signal ended."""
SHOW_CURSOR = b"\x1b[?25h"
"""What shows a terminal's cursor again, which a progress display hides."""

Handler = Callable[[int, FrameType | None], object]


def run(module: str) -> None:
    """Import `module` and call its `main`, a click command."""
    handle_signals(quit_at_once)
    main = import_module(module).main
    try:
        main()
    finally:
        # The command has reported its result; now only Python's shutdown can be interrupted.
        handle_signals(_quit_silently)


def handle_signals(handler: Handler) -> None:
    """Make `handler` handle SIGNALS."""
    for number in SIGNALS:
        signal.signal(number, handler)


def quit_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process with one line. Flush nothing: the signal may have interrupted a write."""
    try:
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _quit_silently(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
