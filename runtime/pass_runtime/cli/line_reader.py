"""The lines of a chat: typed in a terminal, with editing and history, or read from a pipe or a file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO

from pass_runtime.cli.errors import Interrupted, Terminated
from pass_runtime.errors import PassError

if TYPE_CHECKING:
    from prompt_toolkit import Application

Reader = Callable[[], str | None]
"""Returns the next line, None at the end (Ctrl-D, or Ctrl-C at the prompt). PassError for a line that is not UTF-8."""


def open_reader() -> Reader:
    if sys.stdin is None:  # closed
        return lambda: None
    return _terminal() if sys.stdin.isatty() else _lines(sys.stdin.buffer)


def _terminal() -> Reader:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.output import create_output

    session: PromptSession[str] = PromptSession(output=create_output(always_prefer_tty=True))

    def read() -> str | None:
        try:
            with _ended_by_sigterm(session.app):
                return session.prompt("> ")
        except Terminated:
            raise
        except (EOFError, KeyboardInterrupt):  # prompt_toolkit raises a plain KeyboardInterrupt at Ctrl-C
            return None

    return read


@contextmanager
def _ended_by_sigterm(app: Application[str]) -> Iterator[None]:
    """At SIGTERM, make `app` end with `Terminated`. Raised from the signal handler, it would look like a failure of the
    event loop's callback that happens to be running."""

    def end() -> None:
        with suppress(Exception):  # the app has ended already
            app.exit(exception=Terminated())

    def terminate(number: int, frame: FrameType | None) -> None:
        if app.is_running and app.loop is not None:
            app.loop.call_soon_threadsafe(end)
        elif callable(before):
            before(number, frame)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _lines(stream: BinaryIO) -> Reader:
    def read() -> str | None:
        try:
            line = stream.readline()
        except Interrupted:
            return None
        try:
            return line.decode().removesuffix("\n").removesuffix("\r").removeprefix("\ufeff") if line else None
        except UnicodeDecodeError:
            raise PassError("a line that is not UTF-8 text was not read") from None

    return read
