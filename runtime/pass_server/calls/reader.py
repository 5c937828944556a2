"""What all readers of calls share: text outside of calls, calls, and what stands after them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Literal

from pass_server.calls.scanner import CallScanner
from pass_server.parts import Part, Said, overlap


class CallReader(ABC):
    """Finds calls in the text of a turn as it comes. What is no call of one of the functions `names` is text.

    White space beside a call belongs to nothing. A subclass has the marks of its format: it sets `_held`, the text
    that was not read so far, and `_state`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._state: Literal["text", "call", "after", "rest"] = "text"
        """Outside of calls, in one, after one; or in text in which calls are not looked for any more."""
        self._scanner = CallScanner(names)
        self._before = ""
        """What was read before the call and is text where it turns out to be no call."""
        self._called = False

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
        if self._state == "call" and not self._scanner.begun:
            held = self._before + self._scanner.raw + held
        elif self._state == "after" and not self._called:
            held = self._before + held
        elif self._state in ("call", "after") or (self._called and not held.strip()):
            return []
        return [Said(held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        if self._state == "call":
            return self._read_call(parts)
        if self._state == "after":
            return self._leave()
        if self._state == "text":
            return self._find(parts)
        self._say(parts, len(self._held))
        return False

    def _begin_call(self, before: str, held: str) -> None:
        self._scanner, self._before, self._held, self._state = CallScanner(self._names), before, held, "call"

    def _read_call(self, parts: list[Part]) -> bool:
        scanner = self._scanner
        found, self._held = scanner.push(self._held)
        parts += found
        if not scanner.ended:
            return False
        self._called |= scanner.begun
        if scanner.begun:
            self._state = "after"
        else:
            self._held, self._state = self._before + scanner.raw + self._held, "text"
            self._mistaken(parts)
        return True

    def _say(self, parts: list[Part], size: int) -> None:
        """Pass on the first `size` characters of what is held."""
        if size:
            parts.append(Said(self._held[:size]))
            self._held = self._held[size:]

    @abstractmethod
    def _find(self, parts: list[Part]) -> bool:
        """Look for the next call, and pass on text before it. -> whether there is more to read"""

    @abstractmethod
    def _leave(self) -> bool:
        """Read what stands after a call. -> whether there is more to read"""

    @abstractmethod
    def _mistaken(self, parts: list[Part]) -> None:
        """The held text began like a call and is none: pass on as much of it as cannot begin another one."""


class MarkedReader(CallReader):
    """Where calls follow a mark, which may come anywhere in a turn."""

    mark: str

    def _find(self, parts: list[Part]) -> bool:
        at = self._held.find(self.mark)
        if at >= 0:
            rest = self._held[at + len(self.mark) :]
            shown = self._held[:at].rstrip()
            self._say(parts, len(shown))
            self._after_mark(self._held[: at - len(shown)] + self.mark, rest)
            return True
        self._say(parts, len(self._held[: len(self._held) - overlap(self._held, self.mark)].rstrip()))
        return False

    def _after_mark(self, before: str, held: str) -> None:
        self._begin_call(before, held)

    def _mistaken(self, parts: list[Part]) -> None:
        self._say(parts, len(self._before))
