"""How exports and training report their progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Step = Callable[[int, int], None]
"""Called with the steps done so far, and the number of steps."""


class NotedStep(Protocol):
    """A Step that also takes a note for the user, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Progress(Protocol):
    def phase(self, name: str) -> NotedStep:
        """Start a phase, which ends the one before. Return what is called after every step."""
