"""Starts pass-run, pass-export and pass-train, so that a signal ends them with one line.

Importing ONNX Runtime or torch takes a while, and an exception that a signal handler raises in the
middle of an import prints a traceback. Until a command begins its work there is nothing to save or
remove, so a signal then ends the process at once. This module is imported first, so it imports
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

Handler = Callable[[int, FrameType | None], object]


def run(module: str) -> None:
    """Import `module` and call its `main`, a click command."""
    handle_signals(quit_at_once)
    main = import_module(module).main
    try:
        main()
    finally:
        # The command has reported its result, and threads end.
        handle_signals(_quit_silently)


def handle_signals(handler: Handler) -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def quit_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process with one line. Flush nothing: the signal may have interrupted a write."""
    try:
        # A progress display hides the cursor.
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def _quit_silently(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
