"""Record what a command passes to the functions it calls, by name: `LoadOptions.threads`."""

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

Found = dict[str, Any]
PLAIN = (bool, int, float, str, tuple, list, dict, Path)
ANYTHING_ELSE = "*"
"""An expected name that allows all others to change, too."""


@dataclass(frozen=True)
class Case:
    """An option (`given`) and what it changes (`expected`, by name) when it is added to the line
    `base`, or to the command's own line if that is None. Without `given`, `base` is the changed
    line, and is compared with the command's own."""

    given: list[Any]
    expected: Found
    base: list[Any] | None = None


class Calls:
    """Replaces functions, and records the arguments of their calls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.found: Found = {}

    def replace(self, target: str, result: Any = None, *, noted: bool = True) -> None:
        """target: module.function, which is not called. result: returned instead, or a function of
        the arguments (by name) that returns it. noted: whether the arguments are recorded."""
        module, _, name = target.rpartition(".")
        signature = inspect.signature(getattr(import_module(module), name))

        def stand_in(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named).arguments
            for argument, value in bound.items() if noted else ():
                self.note(f"{name}.{argument}", value)
            return result(bound) if callable(result) else result

        self._patch.setattr(target, stand_in)

    def note(self, name: str, value: Any, *, inner: bool = False) -> None:
        """Record a value; a dataclass by its fields, with the name of its class or outer field."""
        if is_dataclass(value) and not isinstance(value, StandIn):
            above = name if inner else type(value).__name__
            for each in fields(value):
                self.note(f"{above}.{each.name}", getattr(value, each.name), inner=True)
        elif value is None or isinstance(value, PLAIN):
            self.found[name] = value


@dataclass
class StandIn:
    """Stands in for a session or another object; every method returns the stand-in itself."""

    calls: Calls
    attributes: Found = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in self.attributes:
            return self.attributes[name]

        def call(*arguments: Any, **named: Any) -> StandIn:
            for i, value in enumerate(arguments):
                self.calls.note(f"{name}.{i}", value)
            for argument, value in named.items():
                self.calls.note(f"{name}.{argument}", value)
            return self

        return call

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None: ...


def handed_on(main: click.Command, line: list[Any], prepare: Callable[[Calls], None]) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        calls = Calls(patch)
        prepare(calls)
        result = CliRunner().invoke(main, [str(word) for word in line], catch_exceptions=False)
        assert result.exit_code in (0, 1), result.output
        return calls.found | {"exit": result.exit_code}


def option_names(command: click.Command) -> set[str]:
    exposed = (parameter for parameter in command.params if parameter.expose_value)
    return {parameter.name for parameter in exposed if parameter.name != "version"}


def changes(
    main: click.Command,
    words: list[Any],
    base: list[Any],
    case: Case,
    prepare: Callable[[Calls], None],
) -> Found:
    """What the case's option changes. words: the command's name. base: the command's own line."""
    other = base if case.base is None else case.base
    lines = (other, other + case.given) if case.given else (base, other)
    before, after = (handed_on(main, [*words, *line], prepare) for line in lines)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    changed = {name: after.get(name) for name in names}
    if ANYTHING_ELSE in case.expected:
        changed = {name: changed.get(name) for name in case.expected}
    return changed
