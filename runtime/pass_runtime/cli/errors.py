"""How commands end: one line on stderr and status 2 for what the user can mend, 130 for Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeVar

import click

from pass_runtime.errors import PassError


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. Its own class: an exact KeyboardInterrupt that passes through exec("..."), as while modules are imported,
    makes CPython's `python -m` end by SIGINT even after it was handled."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command also where Ctrl-C only stops an answer."""


def interrupt_on_signals() -> None:
    """Ctrl-C and SIGTERM end a command the same way: what is finished is kept, nothing half-made stays."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise Terminated if number == signal.SIGTERM else Interrupted

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


def report(problem: object) -> None:
    """One line on stderr, whatever the problem's own text looks like."""
    click.echo("error: " + " ".join(str(problem).splitlines()), err=True)


class _Command(click.Command):
    """click does not say of every usage error which command it is about."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise


class OneLineGroup(_Command, click.Group):
    """A command group whose usage errors, and those of its commands, are one line too."""

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
    """What click itself has to say."""
    try:
        yield
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).removesuffix(".")
        command = f"; see {error.ctx.command_path} --help" if error.ctx is not None else ""
        raise _UsageLine(text[:1].lower() + text[1:] + command) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # --help on a full disk
        report(error.strerror or error)
        _drop_output(2)


P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator for command functions."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PassError as error:
            report(error)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        except BrokenPipeError:  # the reader of our output went away (`| head`): nothing is wrong
            _drop_output(141)
        except OSError as error:
            report(error.strerror or error)
            _drop_output(2)

    return wrapper


def _drop_output(status: int) -> NoReturn:
    """End without the interpreter trying to write what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
