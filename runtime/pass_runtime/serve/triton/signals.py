"""SIGTERM and Ctrl-C in a model's process.

Triton tells a model of the end (`finalize`) once nothing is under way, or never. But what is sent to its whole process
group reaches models too: Ctrl-C does, systemd, `tini -g`, `kill -- -GROUP`.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable

HEARD = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """`told` is called in `loop`, which does not run yet, for each of them until `close`. They come through a socket:
    the handlers that Python itself would call wait until its main thread is back from Triton's code."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: Callable[[], None]) -> None:
        """Where this is not the main thread nothing can be heard."""
        self._told = told
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        loop.add_reader(self._reader, self._read)
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, lambda *_: None) for number in HEARD}
            for number in HEARD:
                signal.siginterrupt(number, False)  # as Triton had it: its threads' system calls go on
            self._woken = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def close(self) -> None:
        """From the thread that made it, when the loop has ended."""
        if self._main:
            signal.set_wakeup_fd(self._woken)
            for number, handler in self._before.items():
                if handler is not None:  # Triton's own, which does nothing either
                    signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def _read(self) -> None:
        for number in self._reader.recv(64):
            if number in HEARD:
                self._told()
