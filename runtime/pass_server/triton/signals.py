"""SIGTERM and Ctrl-C in a model's process.

Triton calls a model's `finalize` only when no request is under way, if at all. But a signal to its whole process group
reaches models directly: from Ctrl-C, systemd, `tini -g`, or `kill -- -GROUP`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

HANDLED = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Calls `on_signal` in `loop`, which does not run yet, for each signal until `close`. The signals come through a
    socket (`signal.set_wakeup_fd`), since Python's own handlers would only run when the main thread returns from
    Triton's code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_signal: Callable[[], None]) -> None:
        """Outside the main thread no signal is handled, since Python cannot do it there."""
        self._on_signal = on_signal
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        loop.add_reader(self._reader, self._read)
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, lambda *_: None) for number in HANDLED}
            for number in HANDLED:
                signal.siginterrupt(number, False)  # Triton's system calls restart after a signal, as before
            self._woken = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """Restore what was there before. For the thread that made this, once the loop has ended."""
        if self._main:
            signal.set_wakeup_fd(self._woken)
            for number, handler in self._before.items():
                if handler is not None:  # Triton's own, which does nothing either
                    signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        for number in self._reader.recv(64):
            if number in HANDLED:
                self._on_signal()
