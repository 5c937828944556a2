"""Thoughts apart from the answer: `<think>...</think>` at the beginning of a turn."""

from __future__ import annotations

from pass_server.parts import Part, Said, Thought, overlap

OPENING, CLOSING = "<think>", "</think>"


class ThoughtReader:
    """Splits the text of a turn as it comes. White space around the thoughts belongs to nothing.

    open_already: whether the prompt ends with the opening mark, so that the turn begins with thoughts.
    """

    def __init__(self, *, open_already: bool) -> None:
        self._state = "thoughts begin" if open_already else "beginning"
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """-> what became known with `text`"""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """-> what was held back, once no more text comes"""
        held, self._held = self._held, ""
        if self._state.startswith("thoughts"):
            held = held.rstrip()
            return [Thought(held)] if held else []
        return [Said(held)] if held and self._state != "answer begins" else []

    def _step(self, parts: list[Part]) -> bool:
        """Read on in `_held`. -> whether there is more to read"""
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
            parts.append(Said(self._held))
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

    def _think(self, parts: list[Part]) -> bool:
        thought, closing, rest = self._held.partition(CLOSING)
        if closing:
            if thought := thought.rstrip():
                parts.append(Thought(thought))
            self._held, self._state = rest, "answer begins"
            return True
        shown = self._held[: len(self._held) - overlap(self._held, CLOSING)].rstrip()
        if shown:
            parts.append(Thought(shown))
            self._held = self._held[len(shown) :]
        return False
