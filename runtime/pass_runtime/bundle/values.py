"""Converts arguments to plain Python values. Raises PassError, with the field's `name`, if the type
is wrong. Numpy's scalars and arrays are accepted; 2.5 is not a whole number, b"Hello" not a list of
token ids, True not a number."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from pass_runtime.errors import PassError


def whole_number(name: str, value: Any) -> int:
    """A whole number as an int."""
    if type(value) is int:
        return value
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise PassError(f"{name} must be a whole number, not {short_repr(value)}")


def number(name: str, value: Any) -> float:
    """A number as a float."""
    if type(value) is float:
        return value
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # An int may be too large for a float.
            pass
    raise PassError(f"{name} must be a number, not {short_repr(value)}")


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise PassError(f"{name} must be True or False, not {short_repr(value)}")


def text(name: str, value: Any) -> str:
    """A string."""
    if isinstance(value, str):
        return value
    raise PassError(f"{name} must be a string, not {short_repr(value)}")


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """A list, tuple or one-dimensional array of whole numbers as a tuple."""
    items = values
    if not isinstance(items, Sequence) and hasattr(
        items, "tolist"
    ):  # an array of numpy, torch or Python itself
        items = items.tolist()
    if isinstance(items, Sequence) and not isinstance(items, str | bytes | bytearray | memoryview):
        if set(map(type, items)) <= {
            int
        }:  # Fast, because a prompt may have a hundred thousand tokens.
            return tuple(items)
        return tuple(whole_number(f"every one of {name}", item) for item in items)
    raise PassError(f"{name} must be a list of whole numbers, not {short_repr(values)}")


def short_repr(value: Any) -> str:
    """`value` as short text for a message; its type's name if it is not of a basic Python type."""
    if isinstance(
        value, bool | int | float | complex | str | bytes | bytearray | list | tuple | dict | None
    ):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"
