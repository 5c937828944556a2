"""Options classes. Flags, HTTP, Triton and C++ are made of their fields."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache, wraps
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError, field_validator
from pydantic import Field as PydanticField
from pydantic.dataclasses import dataclass as pydantic_dataclass

from pass_runtime.errors import PassError

C = TypeVar("C", bound=type)
CONFIG = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
if TYPE_CHECKING:
    TokenIds = Sequence[int]
    Texts = Sequence[str]
else:  # Validation ends at the first wrong element: there may be a million.
    TokenIds = Annotated[tuple[int, ...], PydanticField(fail_fast=True)]
    Texts = Annotated[tuple[str, ...], PydanticField(fail_fast=True)]
TOKEN_IDS = TypeAdapter[Any](TokenIds, config=ConfigDict(strict=True))
TYPES = {
    "bool_type": "True or False",
    "dict_type": "a mapping",
    "float_type": "a number",
    "int_type": "a whole number",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""By pydantic's error."""


@dataclass(frozen=True)
class Option:
    """A field that `option` made.

    type: of a value, also in a "list" or "map". bounds: by pydantic's names. allowed: for
    errors. if_none: what None means, for --help. flag, http, triton: its names there, None for
    none; a bool's flag sets it to `not default`. flag_help: of a flag that negates. tail: the
    cheapest sampler whose tails have it as an input.
    """

    name: str
    label: str
    help: str
    type: Any
    shape: str
    default: Any
    bounds: Mapping[str, Any]
    choices: tuple[str, ...]
    allowed: str
    flag: str | None
    http: str | None
    triton: str | None
    if_none: str = ""
    metavar: str | None = None
    flag_help: str = ""
    tail: str = ""


def option(default: Any, help: str, **attributes: Any) -> Any:
    """attributes: of `Option`, and pydantic's bounds."""
    return field(default=default, metadata={"help": help, **attributes})


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options_class(cls: C) -> C:
    """Make `cls` a frozen dataclass that raises PassError for the first wrong value, and TypeError
    for an unknown name. Numpy's scalars and arrays become Python's, and lists tuples. If
    `label_prefix` of the class is "--", errors name flags."""
    cls._plain = field_validator("*", mode="before")(plain)  # type: ignore[attr-defined]
    made: Any = pydantic_dataclass(frozen=True, config=CONFIG)(cls)
    init = made.__init__

    @wraps(init)
    def checked_init(self: Any, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except ValidationError as error:
            raise _refusal(made, error) from None

    made.__init__ = checked_init
    return made  # type: ignore[no-any-return]


@cache
def options_of(cls: Any) -> Mapping[str, Option]:
    """Return by name the fields that `option` made."""
    return {each.name: _option(cls, each) for each in fields(cls) if "help" in each.metadata}


def _option(cls: Any, each: Field[Any]) -> Option:
    info = cls.__pydantic_fields__[each.name]
    value_type, shape, metadata = info.annotation, "one", info.metadata
    if NoneType in get_args(value_type):
        (value_type,) = (part for part in get_args(value_type) if part is not NoneType)
    parts = get_args(value_type)
    if get_origin(value_type) is Mapping:
        value_type, bounded = get_args(parts[1])  # of Annotated[float, Field(ge=...)]
        shape, metadata = "map", bounded.metadata
    elif get_origin(value_type) in (tuple, Sequence):
        value_type, shape = parts[0], "list"
    choices = get_args(value_type)  # of a Literal
    bounds = {
        name: getattr(bound, name)
        for bound in metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(bound, name)
    }
    texts = {("ge",): "at least {ge}", ("gt",): "above {gt}", ("ge", "le"): "{ge} to {le}"}
    bounded = texts.get(tuple(sorted(bounds)), "").format(**bounds)
    attributes: dict[str, Any] = {
        "allowed": f"one of {', '.join(choices)}" if choices else bounded,
        "default": each.default if each.default_factory is MISSING else each.default_factory(),
        "flag": f"--{each.name.replace('_', '-')}",
        "http": each.name,
        "triton": each.name,
    }
    attributes |= {k: v for k, v in each.metadata.items() if k in Option.__dataclass_fields__}
    return Option(
        name=each.name,
        label=_label(cls, each.name),
        type=str if choices else value_type,
        shape=shape,
        bounds=bounds,
        choices=choices,
        **attributes,
    )


def _label(cls: Any, name: str) -> str:
    return getattr(cls, "label_prefix", "") + name.replace("_", "-")


def _refusal(cls: Any, error: ValidationError) -> Exception:
    problem = error.errors(include_url=False)[0]
    kind, message = problem["type"], problem["msg"].removeprefix("Input should be ")
    first, *inner = problem["loc"]
    if kind == "missing" or "argument" in kind:
        return TypeError(f"{cls.__name__}: {message}: {first}")
    name = first if isinstance(first, str) else fields(cls)[first].name
    made = options_of(cls).get(name)
    label, allowed = _label(cls, name), made.allowed if made else ""
    value = short_repr(problem["input"])
    if inner and inner[-1] == "[key]":
        label = f"a token of {label}"
    elif inner and made and made.shape == "map":
        value += f" for token {inner[0]}"
    elif inner:
        label = f"every one of {label}"
    return PassError(f"{label} must be {TYPES.get(kind) or allowed or message}, not {value}")


def plain(value: Any) -> Any:
    """Return a value without numpy's types, and sequences as tuples."""
    if isinstance(value, Mapping):
        return {_scalar(key): _scalar(each) for key, each in value.items()}
    if not isinstance(value, Sequence):
        value = _scalar(value)
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, str | bytes | bytearray | memoryview):
        return value
    if set(map(type, value)) <= {int, str}:  # quick: a prompt may have 100,000 tokens
        return tuple(value)
    return tuple(map(_scalar, value))


def _scalar(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def whole_numbers(label: str, values: Any) -> tuple[int, ...]:
    """label: its name in errors."""
    if type(values) is tuple and set(map(type, values)) <= {int}:
        return values  # the same object: prompts that are one object share K/V
    try:
        ids: tuple[int, ...] = TOKEN_IDS.validate_python(plain(values))
        return ids
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        wrong = short_repr(problem["input"])
    if problem["loc"]:
        raise PassError(f"every one of {label} must be a whole number, not {wrong}")
    raise PassError(f"{label} must be a list of whole numbers, not {wrong}")


def short_repr(value: Any) -> str:
    """Return short text for a value in a message: the name of its type if that is not basic."""
    if isinstance(
        value,
        bool | int | float | complex | str | bytes | bytearray | list | tuple | dict | None,
    ):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"
