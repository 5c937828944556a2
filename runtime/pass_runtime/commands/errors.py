"""How commands end: with one line on stderr and status 2 at an error, and status 130 at Ctrl-C."""

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
"""The exit status of a command whose output nobody reads any more, as if SIGPIPE had ended it."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. If a plain KeyboardInterrupt passes through exec("..."), which some imports call,
    `python -m` ends by SIGINT, even if the exception was handled; a subclass has no such effect."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a chat; Ctrl-C only ends the answer that is being written."""


def _interrupt(number: int, _: object) -> NoReturn:
    """Raise in the main thread, so that the command saves results and removes partial files."""
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
    """Run imports before a command has written anything. In this context a signal ends the process
    at once with one line, because an exception that a signal handler raises during an import can
    print a traceback. extra: raise PassError if a package that this extra brings is missing."""
    with _signals_handled_by(quit_at_once):
        try:
            yield
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            raise not_installed((error.name or "").partition(".")[0], extra) from None


def require(*extras: str) -> None:
    """Raise PassError if a package of these extras is missing. A command calls this when it starts,
    so that it does not fail at its end. "cpu" is any build of ONNX Runtime."""
    if lacking := {extra: packages for extra in extras if (packages := missing(extra))}:
        raise not_installed(next(iter(lacking.values()))[0], *lacking)


def report(problem: object) -> None:
    """Print `problem` as one line on stderr, even if its text has several lines."""
    click.echo("error: " + " ".join(str(problem).splitlines()), err=True)


class OneLineCommand(click.Command):
    """A command that its usage errors always name: click leaves the context out of some errors."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class OneLineGroup(OneLineCommand, click.Group):
    """A command group that reports its own and its commands' usage errors in one line."""

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
    """Report click's usage errors, and failures to print the help, in one line."""
    try:
        with _output_errors():
            yield
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).removesuffix(".")
        command = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise _UsageLine(text[:1].lower() + text[1:] + command) from None
    except PassError as error:  # The group imports a command when it is named, which may fail.
        raise _UsageLine(str(error)) from None


P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorate a command, so that Ctrl-C and SIGTERM raise `Interrupted` and `Terminated` in it,
    and it reports these and errors in one line."""

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
    """End the process if the block cannot write its output."""
    try:
        yield
    except BrokenPipeError:  # The program that read the output has ended, such as `head`.
        _exit_unflushed(BROKEN_PIPE)
    except OSError as error:  # such as a full disk
        report(error.strerror or error)
        _exit_unflushed(2)


def _exit_unflushed(status: int) -> NoReturn:
    """End the process and discard buffered output, because flushing it would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
