"""The protocols by which exports and training report their progress. `terminal.py` shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Step = Callable[[int, int], None]
"""Reports a phase's progress: it is called with the steps done so far, and the number of steps."""


class NotedStep(Protocol):
    """A Step that also takes a note for the user, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Progress(Protocol):
    """Receives the progress of an export, an engine build or a training."""

    def phase(self, name: str) -> Step:
        """Start a phase, which ends the one before. Return a Step, to be called after each step of
        the phase if its steps are counted."""
