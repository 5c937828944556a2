"""The protocol by which long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Step = Callable[[int, int], None]
"""(steps done, all steps) -> None."""


class NotedStep(Protocol):
    """A Step that also takes a note for the user, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Progress(Protocol):
    """Work calls `phase` when a phase starts, and its Step after each step if they are counted."""

    def phase(self, name: str) -> Step: ...
