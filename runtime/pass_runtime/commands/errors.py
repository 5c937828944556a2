"""How commands end: status 2 and one line on stderr at an error, 130 at Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from pass_runtime.commands.start import INTERRUPTED, SIGNALS, Handler, handle_signals, quit_at_once
from pass_runtime.errors import PassError
from pass_runtime.packages import missing, not_installed

BROKEN_PIPE = 128 + signal.SIGPIPE


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. After a plain KeyboardInterrupt in exec("..."), which some imports call, `python
    -m` ends by SIGINT even if it was handled."""


class Terminated(KeyboardInterrupt):
    """SIGTERM ends a chat; Ctrl-C only an answer."""


def _interrupt(number: int, _: object) -> NoReturn:
    raise Terminated if number == signal.SIGTERM else Interrupted


@contextmanager
def _signals_handled_by(handler: Handler) -> Iterator[None]:
    previous = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        handle_signals(handler)
        yield
    finally:
        for number, previous_handler in previous:
            if previous_handler is not None:  # None: a handler of C code, which Python cannot set
                signal.signal(number, previous_handler)


@contextmanager
def importing(extra: str | None = None) -> Iterator[None]:
    """Import before a command has written anything. A signal then ends the process at once: its
    exception could print a traceback. extra: raise PassError without its packages."""
    with _signals_handled_by(quit_at_once):
        try:
            yield
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            raise not_installed((error.name or "").partition(".")[0], extra) from None


def require(*extras: str) -> None:
    """Raise PassError if a package of these extras is missing. "cpu" is any ONNX Runtime."""
    if lacking := {extra: packages for extra in extras if (packages := missing(extra))}:
        raise not_installed(next(iter(lacking.values()))[0], *lacking)


def report(problem: object) -> None:
    click.echo("error: " + " ".join(str(problem).splitlines()), err=True)


class OneLineCommand(click.Command):
    """Its usage errors name it: click leaves the context out of some."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class OneLineGroup(OneLineCommand, click.Group):
    command_class = OneLineCommand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("no_args_is_help", False)
        super().__init__(*args, **kwargs)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _one_line_usage():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _one_line_usage():
            return super().invoke(ctx)


class _UsageLine(click.ClickException):
    exit_code = 2

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - click's signature
        report(self.message)


@contextmanager
def _one_line_usage() -> Iterator[None]:
    try:
        with _output_errors():
            yield
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).removesuffix(".")
        command = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise _UsageLine(text[:1].lower() + text[1:] + command) from None
    except PassError as error:  # of the import of a command
        raise _UsageLine(str(error)) from None


P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Let a command report errors and signals in one line."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _output_errors(), _signals_handled_by(_interrupt):
                return command(*args, **kwargs)
        except PassError as error:
            report(error)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    return wrapper


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # such as `head`
        _exit_unflushed(BROKEN_PIPE)
    except OSError as error:  # such as a full disk
        report(error.strerror or error)
        _exit_unflushed(2)


def _exit_unflushed(status: int) -> NoReturn:
    """Flushing buffered output would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
