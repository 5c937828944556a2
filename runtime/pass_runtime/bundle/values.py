"""Checks of arguments and request fields, which return plain Python values. They raise PassError,
with the field's `name`, if a value has the wrong type. Numpy's scalars and arrays are accepted; 2.5
is not a whole number, b"Hello" not a list of token ids, True not a number."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from operator import ge, gt, le, lt
from typing import Any, Literal

import numpy as np

from pass_runtime.errors import PassError


def whole_number(name: str, value: Any) -> int:
    """Return a whole number as an int."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PassError(f"{name} must be a whole number, not {short_repr(value)}")


def number(name: str, value: Any) -> float:
    """Return a number as a float."""
    if type(value) is float:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # An int may be too large for a float.
            pass
    raise PassError(f"{name} must be a number, not {short_repr(value)}")


def flag(name: str, value: Any) -> bool:
    """Return True or False as a bool."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise PassError(f"{name} must be True or False, not {short_repr(value)}")


def text(name: str, value: Any) -> str:
    """Return a string."""
    if isinstance(value, str):
        return value
    raise PassError(f"{name} must be a string, not {short_repr(value)}")


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return a list, tuple or one-dimensional array of whole numbers as a tuple."""
    items = values
    # Arrays of numpy, torch and Python itself have `tolist`.
    if not isinstance(items, Sequence) and hasattr(items, "tolist"):
        items = items.tolist()
    if isinstance(items, Sequence) and not isinstance(items, str | bytes | bytearray | memoryview):
        # This check is fast, because a prompt may have a hundred thousand tokens.
        if set(map(type, items)) <= {int}:
            return tuple(items)
        return tuple(whole_number(f"every one of {name}", item) for item in items)
    raise PassError(f"{name} must be a list of whole numbers, not {short_repr(values)}")


def short_repr(value: Any) -> str:
    """Return `value` as short text for a message; of other than basic types, the type's name."""
    if isinstance(
        value, bool | int | float | complex | str | bytes | bytearray | list | tuple | dict | None
    ):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


MAX_BIASES = 1024
"""The most tokens that `logit_bias` may have."""
Kind = Literal["number", "whole", "flag", "text", "texts", "stops", "ids", "biases"]
CONVERTERS = {
    "number": number,
    "whole": whole_number,
    "flag": flag,
    "text": text,
    "ids": whole_numbers,
}
"""By kind, the function that checks a value and converts it. `GenerateOptions` checks texts and
stops itself."""
COMPARISONS = {"ge": ge, "gt": gt, "le": le, "lt": lt}


@dataclass(frozen=True)
class RequestField:
    """A field of `SamplingParams` or `GenerateOptions`, and its name in every interface.

    kind: "stops" are one text or several, "ids" a list of token ids, "biases" numbers by token id.
    neutral: the value if none is given, which changes nothing for most fields. help: what the field
    does. allowed: the values within `bounds`, in words for an error. bounds: of a number, or of
    each of the biases, by pydantic's names (ge, gt, le, lt). choices: the only texts that are
    valid. default: if `neutral` is None, what it means, in words.
    flag, http, triton: the option of `pass-run` with its dashes, the name in OpenAI's or vLLM's
    HTTP API, and the input of a Triton model. "" stands for the field's own name, None for no name;
    http is None, too, if the endpoints use different names. http_schema: arguments of pydantic's
    `Field` for HTTP. They replace `bounds`, and a description replaces `help`. dtype: of Triton's
    input; None if the kind decides it.
    """

    name: str
    kind: Kind
    neutral: Any
    help: str
    allowed: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    default: str = ""
    flag: str | None = ""
    http: str | None = ""
    http_schema: Mapping[str, Any] | None = None
    triton: str | None = ""
    dtype: Literal["UINT64"] | None = None

    def __post_init__(self) -> None:
        for front, own in (("flag", f"--{self.label}"), ("http", self.name), ("triton", self.name)):
            if getattr(self, front) == "":
                object.__setattr__(self, front, own)

    @property
    def label(self) -> str:
        """The name in messages."""
        return self.name.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """The value as a plain Python value. Raises PassError if its type is wrong or it is out of
        bounds."""
        if self.kind == "biases":
            return self._checked_biases(value)
        if (value is None and self.neutral is None) or self.kind not in CONVERTERS:
            return value
        found = CONVERTERS[self.kind](self.label, value)
        if not self.within(found):
            raise PassError(f"{self.label} must be {self.allowed}, not {found}")
        return found

    def _checked_biases(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise PassError(
                f"{self.label} must be a mapping from token ids to numbers, not {short_repr(value)}"
            )
        found = {
            whole_number(f"a token of {self.label}", t): number(self.label, bias)
            for t, bias in value.items()
        }
        if len(found) > MAX_BIASES:
            raise PassError(
                f"{self.label} has {len(found)} tokens; at most {MAX_BIASES} are allowed"
            )
        for token, bias in found.items():
            if not self.within(bias):
                raise PassError(
                    f"{self.label} must be {self.allowed}, not {bias} for token {token}"
                )
        return found

    def within(self, value: Any) -> bool:
        """Whether a number is within the bounds."""
        return all(COMPARISONS[name](value, bound) for name, bound in self.bounds.items())
