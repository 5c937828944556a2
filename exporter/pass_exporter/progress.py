"""How long work reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Step = Callable[[int, int], None]
"""Called with the number of steps that are done, and of all steps."""


class NotedStep(Protocol):
    """A Step that also takes a note for the user, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Progress(Protocol):
    """`phase` is called when a phase starts. If its length is known, the returned Step is called during it."""

    def phase(self, name: str) -> Step: ...
