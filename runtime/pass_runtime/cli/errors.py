"""How commands end: one line on stderr and status 2 for what the user can mend, 130 for Ctrl-C."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

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


P = ParamSpec("P")
R = TypeVar("R")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Decorator for command functions."""

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PassError as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        except BrokenPipeError:  # the reader of our output went away (`| head`): nothing is wrong
            _drop_output(141)
        except OSError as error:
            click.echo(f"error: {error.strerror or error}", err=True)
            _drop_output(2)

    return wrapper


def _drop_output(status: int) -> NoReturn:
    """End without the interpreter trying to write what is still buffered."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
