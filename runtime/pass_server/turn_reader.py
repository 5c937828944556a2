"""Reads an assistant's turn while it is written: reasoning, content and tool calls apart."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """Text of the answer."""

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
    """The next part of the arguments, a JSON object, of the call that began last."""

    text: str


TurnDelta = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def overlap(text: str, marker: str) -> int:
    """How many of the last characters of `text` may begin `marker`, but are not all of it."""
    limit = min(len(text), len(marker) - 1)
    return next((size for size in range(limit, 0, -1) if text.endswith(marker[:size])), 0)


REASONING_START, REASONING_END = "<think>", "</think>"


class SteppedReader(ABC):
    """Reads text as it comes, in steps. _held: the text that was not read so far."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[TurnDelta]:
        """Read `text`, and return the deltas that are certain now."""
        self._held += text
        parts: list[TurnDelta] = []
        while self._step(parts):
            pass
        return parts

    @abstractmethod
    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        """The deltas of the text that was held back. Call it after the last `push`. cut: whether
        the text ended in the middle of a turn."""

    @abstractmethod
    def _step(self, parts: list[TurnDelta]) -> bool:
        """Read a part of `_held`, and add the deltas that are certain now to `parts`. Returns
        whether another step may follow."""


class ReasoningReader(SteppedReader):
    """Splits a turn into reasoning and content. White space around the reasoning is dropped.

    in_reasoning: whether the prompt ends with the marker that opens reasoning.
    """

    def __init__(self, *, in_reasoning: bool) -> None:
        super().__init__()
        # In a state "... begins", white space is skipped.
        self._state = "reasoning begins" if in_reasoning else "beginning"

    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        held, self._held = self._held, ""
        if cut and self._state == "beginning" and len(held.strip()) > 1:
            return []  # most of an opening marker
        if self._state.startswith("reasoning"):
            held = held.rstrip()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held and self._state != "answer begins" else []

    def _step(self, parts: list[TurnDelta]) -> bool:
        if self._state == "beginning":
            return self._find_opening()
        if self._state == "reasoning":
            return self._read_reasoning(parts)
        if self._state in ("reasoning begins", "answer begins"):
            self._held = self._held.lstrip()
            if self._held:
                self._state = "reasoning" if self._state == "reasoning begins" else "answer"
            return bool(self._held)
        if self._held:
            parts.append(ContentDelta(self._held))
            self._held = ""
        return False

    def _find_opening(self) -> bool:
        begins = self._held.lstrip()
        if begins.startswith(REASONING_START):
            self._held, self._state = begins.removeprefix(REASONING_START), "reasoning begins"
            return True
        if REASONING_START.startswith(begins):
            return False
        self._state = "answer"
        return True

    def _read_reasoning(self, parts: list[TurnDelta]) -> bool:
        reasoning, closing, rest = self._held.partition(REASONING_END)
        if closing:
            if reasoning := reasoning.rstrip():
                parts.append(ReasoningDelta(reasoning))
            self._held, self._state = rest, "answer begins"
            return True
        shown = self._held[: len(self._held) - overlap(self._held, REASONING_END)].rstrip()
        if shown:
            parts.append(ReasoningDelta(shown))
            self._held = self._held[len(shown) :]
        return False


class TurnReader:
    """Splits a turn into reasoning, content and calls. reasoning, calls: None if the turn has no
    such part. only_calls: whether only calls may follow the reasoning, so that text beside them
    belongs to their format and is no content."""

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        calls: SteppedReader | None,
        *,
        only_calls: bool = False,
    ) -> None:
        self._reasoning, self._calls, self._only_calls = reasoning, calls, only_calls

    def push(self, text: str) -> list[TurnDelta]:
        """Read `text`, and return the deltas that are certain now."""
        return self._read_calls(
            [ContentDelta(text)] if self._reasoning is None else self._reasoning.push(text)
        )

    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        """As `SteppedReader.finish`."""
        parts = self._read_calls([] if self._reasoning is None else self._reasoning.finish(cut=cut))
        if self._calls is not None:
            parts += self._without_content(self._calls.finish(cut=cut))
        return parts

    def _read_calls(self, parts: list[TurnDelta]) -> list[TurnDelta]:
        """`parts`, in which content is split further into content and calls."""
        if self._calls is None:
            return parts
        split: list[TurnDelta] = []
        for part in parts:
            if isinstance(part, ContentDelta):
                split += self._without_content(self._calls.push(part.text))
            else:
                split.append(part)
        return split

    def _without_content(self, parts: list[TurnDelta]) -> list[TurnDelta]:
        return [part for part in parts if not (self._only_calls and isinstance(part, ContentDelta))]
