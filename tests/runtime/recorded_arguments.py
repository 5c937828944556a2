"""Records the arguments that a command passes to the functions that do its work, by name, such as
`LoadOptions.threads`. The tests of every option of every command compare these records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

Arguments = dict[str, Any]
"""The recorded values by name."""
RECORDED_TYPES = (bool, int, float, str, tuple, list, dict, Path)
ANYTHING_ELSE = "*"
"""In the place of a name in `Case.expected`: arguments that are not named there may change, too."""


@dataclass(frozen=True)
class Case:
    """An option and what it changes.

    words: the option's words on the command line. expected: the arguments that differ if these
    words are added to the line `base`, or to the usual line of the command if `base` is None.
    Without words, the line `base` itself is compared with the usual line.
    """

    words: list[Any]
    expected: Arguments
    base: list[Any] | None = None


class Calls:
    """Replaces functions, and records the arguments of their calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.arguments: Arguments = {}

    def replace(self, target: str, result: Any = None, *, recorded: bool = True) -> None:
        """Replace the function `target` (module.function). result: what its calls return, or a
        function that makes this of the arguments by name. recorded: whether arguments are."""
        module, _, name = target.rpartition(".")
        signature = inspect.signature(getattr(import_module(module), name))

        def stand_in(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named).arguments
            for argument, value in bound.items() if recorded else ():
                self.record(f"{name}.{argument}", value)
            return result(bound) if callable(result) else result

        self._patch.setattr(target, stand_in)

    def record(self, name: str, value: Any, *, inner: bool = False) -> None:
        """Record a value by its name, and a dataclass by its fields: `Class.field`. A field that is
        a dataclass itself (`inner`) is recorded as `Class.field.field`."""
        if is_dataclass(value) and not isinstance(value, StandIn):
            prefix = name if inner else type(value).__name__
            for each in fields(value):
                self.record(f"{prefix}.{each.name}", getattr(value, each.name), inner=True)
        elif value is None or isinstance(value, RECORDED_TYPES):
            self.arguments[name] = value


@dataclass
class StandIn:
    """Stands in for a session or another object. Every method records its arguments and returns the
    stand-in itself, unless `attributes` has its name."""

    calls: Calls
    attributes: Arguments = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in self.attributes:
            return self.attributes[name]

        def call(*arguments: Any, **named: Any) -> StandIn:
            for i, value in enumerate(arguments):
                self.calls.record(f"{name}.{i}", value)
            for argument, value in named.items():
                self.calls.record(f"{name}.{argument}", value)
            return self

        return call

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None: ...


def recorded_arguments(
    main: click.Command, line: list[Any], prepare: Callable[[Calls], None]
) -> Arguments:
    """Run a command line. Return the arguments that it passed to the functions that `prepare`
    replaces, and its exit status as `exit`."""
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        prepare(calls)
        result = CliRunner().invoke(main, [str(word) for word in line], catch_exceptions=False)
        assert result.exit_code in (0, 1), result.output
        return calls.arguments | {"exit": result.exit_code}


def option_names(command: click.Command) -> set[str]:
    """Return the names of the command's parameters, without --version and --help."""
    exposed = (parameter for parameter in command.params if parameter.expose_value)
    return {parameter.name for parameter in exposed if parameter.name != "version"}


def changes(
    main: click.Command,
    words: list[Any],
    base: list[Any],
    case: Case,
    prepare: Callable[[Calls], None],
) -> Arguments:
    """Return the arguments that the case's option changes, with their new values. words: the
    command's name. base: the command's usual line, without its name."""
    without = base if case.base is None else case.base
    lines = (without, without + case.words) if case.words else (base, without)
    before, after = (recorded_arguments(main, [*words, *line], prepare) for line in lines)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    changed = {name: after.get(name) for name in names}
    if ANYTHING_ELSE in case.expected:
        changed = {name: changed.get(name) for name in case.expected}
    return changed
