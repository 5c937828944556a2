"""Runs commands with and without an option, and records what they hand on."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

Arguments = dict[str, Any]
RECORDED_TYPES = (bool, int, float, str, tuple, list, dict, Path)
OTHER_VALUES = {click.INT: 12, click.FLOAT: 0.5}
"""By type, a value that is no default; others are `other`."""


SAMPLING_VALUES: Arguments = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "seed": 7,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": -2.0},
}
REQUEST_VALUES: Arguments = {
    "plan": "fused",
    "lookahead": 1,
    "draft": "lookahead",
    "stop": ["a", "b"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "cache_salt": "s",
    "min_tokens": 2,
    "bad_words": ["a"],
    "allowed_token_ids": [5],
}
"""For options of samplings and of requests, values in JSON that are not their defaults."""


@dataclass(frozen=True)
class Case:
    """An option whose test needs more. base: in place of the usual line. expected: what must
    change, by default what has its name."""

    words: str | None = None
    base: str | None = None
    expected: Mapping[str, Any] | None = None


class Calls:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.arguments: Arguments = {}

    def replace(self, target: str, result: Any = None, *, recorded: bool = True) -> None:
        """result: what `target` returns, or a function of its arguments by name."""
        module, _, name = target.rpartition(".")
        signature = inspect.signature(getattr(import_module(module), name))

        def stand_in(*arguments: Any, **named: Any) -> Any:
            bound = signature.bind(*arguments, **named).arguments
            for argument, value in bound.items() if recorded else ():
                self.record(f"{name}.{argument}", value)
            return result(bound) if callable(result) else result

        self._patch.setattr(target, stand_in)

    def record(self, name: str, value: Any, *, inner: bool = False) -> None:
        """Record a dataclass by its fields: `Class.field.field`."""
        if is_dataclass(value) and not isinstance(value, StandIn):
            prefix = name if inner else type(value).__name__
            for each in fields(value):
                self.record(f"{prefix}.{each.name}", getattr(value, each.name), inner=True)
        elif value is None or isinstance(value, RECORDED_TYPES):
            self.arguments[name] = value


@dataclass
class StandIn:
    """Methods record their arguments and return the stand-in."""

    calls: Calls
    attributes: Arguments = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in self.attributes:
            return self.attributes[name]

        def call(*arguments: Any, **named: Any) -> StandIn:
            for argument, value in (*enumerate(arguments), *named.items()):
                self.calls.record(f"{name}.{argument}", value)
            return self

        return call

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class Command:
    """words: its name. base: usual arguments. prepare: replaces what it calls."""

    main: click.Command
    words: str
    base: str
    prepare: Callable[[Calls], None]
    cases: Mapping[str, Case] = field(default_factory=dict)

    @property
    def command(self) -> Any:
        group: Any = self.main
        return group.get_command(click.Context(group), self.words) if self.words else group

    def names(self) -> list[str]:
        exposed = (each for each in self.command.params if each.expose_value)
        return [each.name for each in exposed if each.name != "version"]

    def assert_option_changes_its_field(self, name: str) -> None:
        case = self.cases.get(name, Case())
        (parameter,) = (each for each in self.command.params if each.name == name)
        base = shlex.split(self.base if case.base is None else case.base)
        line = [*base, *shlex.split(self.line_words(name))]
        if isinstance(parameter, click.Argument):
            arguments = [each for each in self.command.params if isinstance(each, click.Argument)]
            line[arguments.index(parameter)] = "other"
        before, after = self.run(base), self.run(line)
        changed = {
            key: after.get(key) for key in before | after if before.get(key) != after.get(key)
        }
        if case.expected is not None:
            assert changed.items() >= case.expected.items(), changed
            return
        value = self.command.make_context(self.words, list(line)).params[name]
        assert changed and all(key.endswith(f".{name}") for key in changed), changed
        assert all(each == value for each in changed.values()), changed

    def line_words(self, name: str) -> str:
        (parameter,) = (each for each in self.command.params if each.name == name)
        case = self.cases.get(name, Case())
        return _words(parameter) if case.words is None else case.words

    def run(self, line: list[str]) -> Arguments:
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch)
            self.prepare(calls)
            words = [*shlex.split(self.words), *line]
            result = CliRunner().invoke(self.main, words, catch_exceptions=False)
            assert result.exit_code in (0, 1), result.output
            return calls.arguments | {"exit": result.exit_code}

    def assert_refused(self, line: str) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.prepare(Calls(patch))
            words = [*shlex.split(self.words), *shlex.split(line)]
            result = CliRunner().invoke(self.main, words)
        assert result.exit_code == 2 and "--" in result.stderr, line


def _words(parameter: click.Parameter) -> str:
    if not isinstance(parameter, click.Option):
        return ""
    if parameter.is_flag:
        is_on = parameter.default is True and parameter.secondary_opts
        return (parameter.secondary_opts if is_on else parameter.opts)[-1]
    value: Any = OTHER_VALUES.get(parameter.type, "other")
    if isinstance(parameter.type, click.Choice):
        value = next(each for each in parameter.type.choices if each != parameter.default)
    elif isinstance(parameter.type, click.IntRange):
        value = 12
    return f"{parameter.opts[-1]} {value}"
