"""Reads an assistant's turn while it is written: reasoning, content and tool calls apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call of a function, whose arguments follow."""

    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """The next text of the arguments, a JSON object, of the call that began last."""

    text: str


TurnDelta = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` with which `marker` begins, but for all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


OPENING, CLOSING = "<think>", "</think>"


class SteppedReader(ABC):
    """Reads text as it comes, in steps.

    _held: the text that was not read so far.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[TurnDelta]:
        """-> what became known with `text`"""
        self._held += text
        parts: list[TurnDelta] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self) -> list[TurnDelta]:
        """-> what was held back, once no more text comes"""

    @abstractmethod
    def _step(self, parts: list[TurnDelta]) -> bool:
        """Read on in `_held`, and add what becomes known to `parts`. -> whether there is more to read"""


class ReasoningReader(SteppedReader):
    """Splits the text of a turn as it comes. White space around the thoughts belongs to nothing.

    open_already: whether the prompt ends with the opening mark, so that the turn begins with thoughts.
    """

    def __init__(self, *, open_already: bool) -> None:
        super().__init__()
        self._state = "thoughts begin" if open_already else "beginning"

    def finish(self) -> list[TurnDelta]:
        held, self._held = self._held, ""
        if self._state.startswith("thoughts"):
            held = held.rstrip()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held and self._state != "answer begins" else []

    def _step(self, parts: list[TurnDelta]) -> bool:
        if self._state == "beginning":
            return self._find_opening()
        if self._state == "thoughts":
            return self._think(parts)
        if self._state in ("thoughts begin", "answer begins"):
            self._held = self._held.lstrip()
            if self._held:
                self._state = "thoughts" if self._state == "thoughts begin" else "answer"
            return bool(self._held)
        if self._held:
            parts.append(ContentDelta(self._held))
            self._held = ""
        return False

    def _find_opening(self) -> bool:
        begins = self._held.lstrip()
        if begins.startswith(OPENING):
            self._held, self._state = begins.removeprefix(OPENING), "thoughts begin"
            return True
        if OPENING.startswith(begins):
            return False
        self._state = "answer"
        return True

    def _think(self, parts: list[TurnDelta]) -> bool:
        thought, closing, rest = self._held.partition(CLOSING)
        if closing:
            if thought := thought.rstrip():
                parts.append(ReasoningDelta(thought))
            self._held, self._state = rest, "answer begins"
            return True
        shown = self._held[: len(self._held) - overlap(self._held, CLOSING)].rstrip()
        if shown:
            parts.append(ReasoningDelta(shown))
            self._held = self._held[len(shown) :]
        return False


class TurnReader:
    """Reads with a reader of thoughts first and a reader of calls after that, if there are such."""

    def __init__(self, thoughts: ReasoningReader | None, calls: SteppedReader | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def push(self, text: str) -> list[TurnDelta]:
        """-> what became known with `text`"""
        return self._and_calls([ContentDelta(text)] if self._thoughts is None else self._thoughts.push(text))

    def finish(self) -> list[TurnDelta]:
        """-> what was held back, once no more text comes"""
        parts = self._and_calls([] if self._thoughts is None else self._thoughts.finish())
        return parts + ([] if self._calls is None else self._calls.finish())

    def _and_calls(self, parts: list[TurnDelta]) -> list[TurnDelta]:
        if self._calls is None:
            return parts
        found: list[TurnDelta] = []
        for part in parts:
            found += self._calls.push(part.text) if isinstance(part, ContentDelta) else [part]
        return found
