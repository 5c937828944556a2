"""How commands end: with one line on stderr and status 2 for an error that the user can mend, with 130 for Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from pass_runtime.cli.start import INTERRUPTED, SIGNALS, Handler, handle_signals, quit_at_once
from pass_runtime.errors import PassError


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. A class of its own, since CPython's `python -m` ends by SIGINT once a plain KeyboardInterrupt has passed
    through exec("..."), as happens while modules are imported, even if it was handled."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. It also ends a chat, in which Ctrl-C only stops an answer."""


def _interrupt(number: int, _: object) -> NoReturn:
    """Raise in the main thread: the command keeps what is finished and removes what is half-made as it unwinds."""
    raise Terminated if number == signal.SIGTERM else Interrupted


@contextmanager
def _signals_handled_by(handler: Handler) -> Iterator[None]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    try:
        handle_signals(handler)
        yield
    finally:
        for number, handling in before:
            if handling is not None:  # None: set by code other than Python, which cannot restore it
                signal.signal(number, handling)


def importing() -> AbstractContextManager[None]:
    """For a block of imports before a command has made anything: a signal ends the process at once, with one line. (An
    exception raised in the middle of an import would print a traceback.)"""
    return _signals_handled_by(quit_at_once)


def report(problem: object) -> None:
    """Print a problem as one line on stderr, even where its text has several."""
    click.echo("error: " + " ".join(str(problem).splitlines()), err=True)


class _Command(click.Command):
    """Adds to every usage error the command that it is about, which click leaves out of some."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class OneLineGroup(_Command, click.Group):
    """A command group that reports usage errors, those of its commands too, in one line."""

    command_class = _Command

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
    """Turn what click raises into one line."""
    try:
        yield
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).removesuffix(".")
        command = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise _UsageLine(text[:1].lower() + text[1:] + command) from None
    except BrokenPipeError:  # from --help
        _drop_output(141)
    except OSError as error:  # as from --help with its output on a full disk
        report(error.strerror or error)
        _drop_output(2)


P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator for command functions: Ctrl-C and SIGTERM raise in them, and errors become one line on stderr."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _signals_handled_by(_interrupt):
                return command(*args, **kwargs)
        except PassError as error:
            report(error)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:  # the reader of our output has ended (`| head`), which is no error
            _drop_output(141)
        except OSError as error:
            report(error.strerror or error)
            _drop_output(2)

    return wrapper


def _drop_output(status: int) -> NoReturn:
    """End the process. The interpreter then writes what is still buffered to nowhere, rather than fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
