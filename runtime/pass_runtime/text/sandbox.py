"""The sandbox that chat templates run in: jinja's, which keeps Python out of reach, with bounds on time and size.

Templates come with downloaded models. A loop that does not end, a recursion that doubles, or a text multiplied by a
billion would hang the process. So every render has a budget of seconds and of characters: each turn of a loop, each
call and each filter draws on it, in any thread, and operators that make large values are checked before they run.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, nodes, pass_context, pass_eval_context
from jinja2.filters import make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 5.0
"""The time limit of a render; chat templates take milliseconds."""
MAX_CHARACTERS = 1 << 25
"""The most that a render may write, and the longest text that it may make: more than any model reads."""
MAX_NUMBER = 1_000_000
"""The largest whole number that functions, filters and repetition take, as a width or a count."""
MAX_BITS = 4096
"""The largest whole number that a template may compute, in bits."""
WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{5,})|\{[^{}]*\d{5,}")
"""Formats that pad to tens of thousands of characters, or to a width that is an argument."""


class TemplateLimitError(TemplateError):
    """The template does more than any chat template needs."""


@dataclass
class _Budget:
    deadline: float
    characters: int = MAX_CHARACTERS

    def spend(self, characters: int) -> None:
        self.characters -= characters
        if self.characters < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARACTERS} characters")
        if time.monotonic() > self.deadline:
            raise TemplateLimitError(f"it runs longer than {SECONDS:g} seconds")


_WithBody = nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block
_BUDGET: ContextVar[_Budget] = ContextVar("template budget")


@contextmanager
def budget() -> Iterator[None]:
    """Give what is compiled or rendered inside a budget of its own."""
    token = _BUDGET.set(_Budget(time.monotonic() + SECONDS))
    try:
        yield
    finally:
        _BUDGET.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compile and render inside `budget()`; TemplateLimitError where a template exceeds it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, optimized=False, **options)
        del self.globals["lipsum"]  # it writes any amount of text
        checked = {name: check(self.filters[name]) for name, check in _CHECKS.items()}
        self.filters = {name: bounded(function) for name, function in (self.filters | checked).items()}

    @staticmethod
    def spend(characters: int) -> None:
        """Called at the beginning of every loop turn, macro and block. characters: the literal text in its body."""
        _BUDGET.get().spend(characters)

    @staticmethod
    def tilde(*parts: Any) -> str:
        """The operator `~`."""
        return str(_checked("".join(map(str, parts))))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and function.__name__ == "join" and len(args) == 1:
            args = (_joinable(args[0], owner),)
        if isinstance(owner, str) and function.__name__ == "replace":
            _check_replacement(owner, *args[:2])
        return bounded(super().call)(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _check_repetition(left, right)
            _check_repetition(right, left)
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and whole and left.bit_length() * right > MAX_BITS:
            raise TemplateLimitError("it computes with huge numbers")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return _checked(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        bodies: tuple[type[_WithBody], ...] = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
        for node in list(tree.find_all(bodies)):
            size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_call("spend", [nodes.Const(size)])))
        _TildeAsCall().visit(tree)
        return tree


class _TildeAsCall(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("tilde", node.nodes)


def _call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


@pass_context  # so that jinja leaves constants to the render, where there is a budget
def _written(_: Context, value: Any) -> str:
    """The text of a value that the template writes, counted."""
    text = str(value)
    _BUDGET.get().spend(len(text))
    return text


def bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with a check of its whole-number arguments, of the time and of its result."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and abs(value) > MAX_NUMBER for value in (*args, *kwargs.values())):
            raise TemplateLimitError(f"it uses a number above {MAX_NUMBER}")
        _BUDGET.get().spend(0)
        return _checked(function(*args, **kwargs))

    return checked


def _checked_join(join: Callable[..., str]) -> Callable[..., str]:
    @pass_eval_context
    def filter_join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(context.environment, attribute), value)
        return join(context, _joinable(value, d), d)

    return filter_join


def _checked_replace(replace: Callable[..., str]) -> Callable[..., str]:
    @pass_eval_context
    def filter_replace(context: EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
        _check_replacement(s, old, new)
        return replace(context, s, old, new, count)

    return filter_replace


def _checked_format(form: Callable[..., str]) -> Callable[..., str]:
    def filter_format(value: str, *args: Any, **kwargs: Any) -> str:
        _check_format(str(value))
        return form(value, *args, **kwargs)

    return filter_format


_CHECKS = {"join": _checked_join, "replace": _checked_replace, "format": _checked_format}


def _joinable(items: Iterable[Any], between: str) -> list[str]:
    parts = [str(item) for item in items]
    if sum(map(len, parts)) + len(between) * len(parts) > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS} characters")
    return parts


def _check_replacement(text: str, old: Any = "", new: Any = "") -> None:
    if str(text).count(str(old)) * len(str(new)) > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes a text of more than {MAX_CHARACTERS} characters")


def _check_repetition(sequence: Any, times: Any) -> None:
    if isinstance(sequence, str | list | tuple) and isinstance(times, int) and len(sequence) * times > MAX_NUMBER:
        raise TemplateLimitError(f"it repeats something to a length above {MAX_NUMBER}")


def _check_format(text: str) -> None:
    if WIDE.search(text):
        raise TemplateLimitError("it formats to a width of more than 9999 characters")


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes something longer than {MAX_CHARACTERS}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimitError("it computes with huge numbers")
    return value
