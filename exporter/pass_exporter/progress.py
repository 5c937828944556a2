"""How long work tells what it is doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Step = Callable[[int, int], None]
"""Called with (steps done, steps in all)."""


class NotedStep(Protocol):
    """A Step that takes a note for the user too, such as the loss."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class Progress(Protocol):
    """Told when a phase starts; `step(done, total)` inside a phase whose length is known."""

    def phase(self, name: str) -> Step: ...
