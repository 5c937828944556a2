"""Splits the model's turn into reasoning, content and tool calls while it is written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True)
class ToolCallStart:
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """The next part of the arguments of the call that began last."""

    text: str


TurnDelta = ContentDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def overlap(text: str, marker: str) -> int:
    limit = min(len(text), len(marker) - 1)
    return next((size for size in range(limit, 0, -1) if text.endswith(marker[:size])), 0)


REASONING_START, REASONING_END = "<think>", "</think>"


class SteppedReader(ABC):
    """Reads text that comes in pieces of any size. _held: what was pushed and is not read so far,
    as it may still become a marker or a call."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[TurnDelta]:
        """Read `text`, and return the deltas that are certain now."""
        self._held += text
        deltas: list[TurnDelta] = []
        while self._step(deltas):
            pass
        return deltas

    @abstractmethod
    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        """Return the deltas of the text that was held back. cut: whether it ended in the middle of
        a turn."""

    @abstractmethod
    def _step(self, deltas: list[TurnDelta]) -> bool:
        """Read a part of `_held`, and add its deltas. Return False if there is no more to read."""


class ReasoningReader(SteppedReader):
    """Splits a turn into reasoning and content. White space around the reasoning is dropped.
    in_reasoning: whether the prompt ends with the marker that opens reasoning."""

    def __init__(self, *, in_reasoning: bool) -> None:
        super().__init__()
        # Before an opening marker: "beginning". In "... begins", white space is skipped.
        self._state = "reasoning begins" if in_reasoning else "beginning"

    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        held, self._held = self._held, ""
        if cut and self._state == "beginning" and len(held.strip()) > 1:
            return []  # an opening marker that was cut off; a single "<" may begin anything
        if self._state.startswith("reasoning"):
            start = held.rfind("<")
            if cut and 0 <= start < len(held) - 1 and REASONING_END.startswith(held[start:]):
                held = held[:start]  # a closing marker that was cut off
            held = held.rstrip()
            return [ReasoningDelta(held)] if held else []
        return [ContentDelta(held)] if held and self._state != "answer begins" else []

    def _step(self, deltas: list[TurnDelta]) -> bool:
        if self._state == "beginning":
            return self._find_opening()
        if self._state == "reasoning":
            return self._read_reasoning(deltas)
        if self._state in ("reasoning begins", "answer begins"):
            self._held = self._held.lstrip()
            if self._held:
                self._state = "reasoning" if self._state == "reasoning begins" else "answer"
            return bool(self._held)
        if self._held:
            deltas.append(ContentDelta(self._held))
            self._held = ""
        return False

    def _find_opening(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(REASONING_START):
            self._held, self._state = text.removeprefix(REASONING_START), "reasoning begins"
            return True
        if REASONING_START.startswith(text):
            return False
        self._state = "answer"
        return True

    def _read_reasoning(self, deltas: list[TurnDelta]) -> bool:
        reasoning, closing, rest = self._held.partition(REASONING_END)
        if closing:
            if reasoning := reasoning.rstrip():
                deltas.append(ReasoningDelta(reasoning))
            self._held, self._state = rest, "answer begins"
            return True
        certain = self._held[: len(self._held) - overlap(self._held, REASONING_END)].rstrip()
        if certain:
            deltas.append(ReasoningDelta(certain))
            self._held = self._held[len(certain) :]
        return False


class TurnReader:
    """Splits a turn into reasoning, content and calls. reasoning, calls: None if the turn cannot
    have the part. only_calls: whether text beside calls belongs to their format, and is dropped."""

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
        held = [] if self._reasoning is None else self._reasoning.finish(cut=cut)
        deltas = self._read_calls(held)
        if self._calls is not None:
            deltas += self._allowed(self._calls.finish(cut=cut))
        return deltas

    def _read_calls(self, deltas: list[TurnDelta]) -> list[TurnDelta]:
        if self._calls is None:
            return deltas
        split: list[TurnDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                split += self._allowed(self._calls.push(delta.text))
            else:
                split.append(delta)
        return split

    def _allowed(self, deltas: list[TurnDelta]) -> list[TurnDelta]:
        return [
            each for each in deltas if not (self._only_calls and isinstance(each, ContentDelta))
        ]
