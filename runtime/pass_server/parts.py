"""The parts of an assistant's turn: what it says, what it thinks, and the functions that it calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of a function, whose arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next text of the arguments, a JSON object, of the call that began last."""

    text: str


Part = Said | Thought | CallBegun | Arguments


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` with which `marker` begins, but for all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
