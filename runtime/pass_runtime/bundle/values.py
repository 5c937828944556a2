"""Checks of arguments, and descriptions of options, from which checks and flags are made.

The checks return plain Python values. They raise PassError, with the argument's name, if a value
has the wrong type. Numpy's scalars and arrays are accepted; 2.5 is not a whole number, b"Hello" not
a list of token ids, True not a number.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Real
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Literal

import numpy as np

from pass_runtime.errors import PassError


def as_whole_number(name: str, value: Any) -> int:
    """Return a whole number as an int."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PassError(f"{name} must be a whole number, not {short_repr(value)}")


def as_number(name: str, value: Any) -> float:
    """Return a number as a float."""
    if type(value) is float:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # An int may be too large for a float.
            pass
    raise PassError(f"{name} must be a number, not {short_repr(value)}")


def as_flag(name: str, value: Any) -> bool:
    """Return True or False as a bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise PassError(f"{name} must be True or False, not {short_repr(value)}")


def as_text(name: str, value: Any) -> str:
    """Return a string."""
    if isinstance(value, str):
        return value
    raise PassError(f"{name} must be a string, not {short_repr(value)}")


def as_whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return a list, tuple or one-dimensional array of whole numbers as a tuple."""
    items = values
    # Arrays of numpy, torch and Python itself have `tolist`.
    if not isinstance(items, Sequence) and hasattr(items, "tolist"):
        items = items.tolist()
    if isinstance(items, Sequence) and not isinstance(items, str | bytes | bytearray | memoryview):
        # Compare all types at once: a prompt may have a hundred thousand tokens.
        if set(map(type, items)) <= {int}:
            return tuple(items)
        return tuple(as_whole_number(f"every one of {name}", item) for item in items)
    raise PassError(f"{name} must be a list of whole numbers, not {short_repr(values)}")


def short_repr(value: Any) -> str:
    """Return short text for `value` in a message: the name of its type if it is not a basic one."""
    if isinstance(
        value, bool | int | float | complex | str | bytes | bytearray | list | tuple | dict | None
    ):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


MAX_BIASES = 1024
"""The most tokens that `logit_bias` may have."""
Kind = Literal["number", "whole", "flag", "text", "texts", "stops", "ids", "biases", "path"]
CONVERTERS = {
    "number": as_number,
    "whole": as_whole_number,
    "flag": as_flag,
    "text": as_text,
    "ids": as_whole_numbers,
}
"""By kind, the function that checks a value and converts it. Classes that have fields of the kinds
"texts" and "stops" check these themselves."""
COMPARISONS = {"ge": ge, "gt": gt, "le": le, "lt": lt}
KIND_BY_ANNOTATION: dict[str, Kind] = {
    "int": "whole",
    "float": "number",
    "bool": "flag",
    "str": "text",
    "tuple[str,": "texts",
    "Path": "path",
}
"""By the first word of a field's annotation, the option's kind; others are "text"."""


@dataclass(frozen=True)
class OptionField:
    """A field of an options class, and the flag that sets it.

    kind: what the value is. "stops" are one text or several, "ids" a list of token ids, "biases"
    numbers by token id.
    bounds: of a number, or of each of the biases, by pydantic's names (ge, gt, le, lt). allowed:
    the values within `bounds`, in words for an error. It may be left out if `bounds` is just ge.
    choices: the only texts that are valid.
    optional: whether None is valid, too, as it is if `default` is None. if_none: in words, what
    None or leaving out the flag means.
    flag: the option of a command, with its dashes; "" stands for `--` and the field's name, None
    for no flag. The flag of a field of the kind "flag" sets the field to `not default`. help: what
    the flag does. metavar: what --help shows for the value, if not its type.
    label_prefix: "--" if messages name the flag rather than the field.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    allowed: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    optional: bool = False
    if_none: str = ""
    flag: str | None = ""
    metavar: str | None = None
    label_prefix: str = ""

    def __post_init__(self) -> None:
        if self.flag == "":
            object.__setattr__(self, "flag", f"--{self.name.replace('_', '-')}")
        if self.bounds and not self.allowed:
            object.__setattr__(self, "allowed", f"at least {self.bounds['ge']}")

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.label_prefix + self.name.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """Return the value as a plain Python value. Raises PassError if its type is wrong, or if
        it is out of bounds or none of the choices."""
        if self.kind == "biases":
            return self._checked_biases(value)
        is_none_valid = self.optional or self.default is None
        if (value is None and is_none_valid) or self.kind not in CONVERTERS:
            return value
        plain = CONVERTERS[self.kind](self.label, value)
        if not self.within(plain):
            raise PassError(f"{self.label} must be {self.allowed}, not {plain}")
        if self.choices and plain not in self.choices:
            choices = ", ".join(self.choices)
            raise PassError(f"{self.label} must be one of {choices}, not {short_repr(plain)}")
        return plain

    def _checked_biases(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise PassError(
                f"{self.label} must be a mapping from token ids to numbers, not {short_repr(value)}"
            )
        biases = {
            as_whole_number(f"a token of {self.label}", token): as_number(self.label, bias)
            for token, bias in value.items()
        }
        if len(biases) > MAX_BIASES:
            raise PassError(
                f"{self.label} has {len(biases)} tokens; at most {MAX_BIASES} are allowed"
            )
        for token, bias in biases.items():
            if not self.within(bias):
                raise PassError(
                    f"{self.label} must be {self.allowed}, not {bias} for token {token}"
                )
        return biases

    def within(self, value: Any) -> bool:
        """Whether a number is within the bounds."""
        return all(COMPARISONS[name](value, bound) for name, bound in self.bounds.items())


def option(default: Any, help: str, **attributes: Any) -> Any:
    """Return a dataclass field that has an `OptionField` with these attributes."""
    return field(default=default, metadata={"help": help, **attributes})


class Options:
    """The base class of frozen dataclasses whose fields `option` made. Raises PassError if a value
    is wrong; the values become plain Python values."""

    label_prefix: ClassVar[str] = ""
    """See `OptionField`."""

    def __post_init__(self) -> None:
        for name, each in self.option_fields().items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))

    @classmethod
    @cache
    def option_fields(cls) -> Mapping[str, OptionField]:
        """Return the descriptions of the fields that `option` made, by name."""
        return {
            each.name: OptionField(
                each.name,
                KIND_BY_ANNOTATION.get(str(each.type).partition(" ")[0], "text"),
                each.default,
                optional=str(each.type).endswith("| None"),
                label_prefix=cls.label_prefix,
                **each.metadata,
            )
            for each in fields(cls)  # type: ignore[arg-type]
            if each.metadata
        }


@dataclass(frozen=True)
class RequestField(OptionField):
    """A field of `SamplingParams` or `GenerateOptions`, and its name in every interface.

    http, triton: the name in OpenAI's or vLLM's HTTP API, and the input of a Triton model. ""
    stands for the field's own name, None for no name; http is None, too, if the endpoints use
    different names. http_schema: arguments of pydantic's `Field` for HTTP. They replace `bounds`,
    and a description replaces `help`. dtype: of Triton's input; None if the kind decides it.
    """

    http: str | None = ""
    http_schema: Mapping[str, Any] | None = None
    triton: str | None = ""
    dtype: Literal["UINT64"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("http", "triton"):
            if getattr(self, name) == "":
                object.__setattr__(self, name, self.name)
