"""Reads the tool calls in a turn while it is written: content outside of calls, calls, and what stands after them."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection
from typing import Literal

from pass_server.turn_reader import ArgumentsDelta, ContentDelta, SteppedReader, ToolCallStart, TurnDelta, overlap

ARGUMENTS = ("arguments", "parameters")
"""The names of the field with the arguments, in any format."""
State = Literal["before", "key", "in key", "colon", "value", "in value", "comma", "done", "wrong"]
SPACE = " \t\r\n"


class CallScanner:
    """Reads the object character by character. A call begins once its function is known and its arguments have begun;
    from then on they are passed on as they come, spelled as the model spells them.

    state: "wrong" if the text is no call of one of the functions `names`, as soon as that is certain. begun: whether
    the call began, after which what is wrong ends the call. raw: all that was read.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.state: State = "before"
        self.begun = False
        self.raw = ""
        self._name = ""
        self._key = self._value = self._unsent = ""
        self._arguments = False  # whether the value of the arguments has begun
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def ended(self) -> bool:
        return self.state in ("done", "wrong")

    def push(self, text: str) -> tuple[list[TurnDelta], str]:
        """-> (what became known, the text after the object)"""
        parts: list[TurnDelta] = []
        place = 0
        while place < len(text) and not self.ended:
            place += self._read(text[place])
            if not self.begun and self.state != "wrong" and self._name and (self._arguments or self.state == "done"):
                self.begun = True
                parts.append(ToolCallStart(self._name))
        self.raw += text[:place]
        if self.begun and self.state == "done" and not self._arguments:
            self._unsent = "{}"
        if self.begun and self._unsent:
            parts.append(ArgumentsDelta(self._unsent))
            self._unsent = ""
        return parts, text[place:]

    def _read(self, character: str) -> int:
        """-> how many characters were read: 1, or 0 if only the state changed"""
        if self.state == "in key":
            return self._read_key(character)
        if self.state == "in value":
            return self._read_value(character)
        if character in SPACE:
            return 1
        if self.state == "value":
            return self._begin_value(character)
        follows = {
            ("before", "{"): "key",
            ("key", '"'): "in key",
            ("key", "}"): "done",
            ("colon", ":"): "value",
            ("comma", ","): "key",
            ("comma", "}"): "done",
        }
        after = follows.get((self.state, character))
        if after is None or (after == "done" and not self._name):
            self.state = "wrong"
            return 0
        self.state = after  # type: ignore[assignment]
        return 1

    def _read_key(self, character: str) -> int:
        if character == '"':
            self.state = "colon"
        else:
            self._key += character
        return 1

    def _begin_value(self, character: str) -> int:
        self._value, self._depth, self._quoted, self._escaped = "", 0, False, False
        self.state = "in value"
        if self._key in ARGUMENTS:
            if character != "{" or self._arguments:
                self.state = "wrong"
            else:
                self._arguments = True
        return 0

    def _read_value(self, character: str) -> int:
        if not self._quoted and self._depth == 0 and self._value and character in ",}]" + SPACE:
            self._end_value()
            return 0
        self._value += character
        if self._key in ARGUMENTS:
            self._unsent += character
        if self._quoted:
            self._quoted = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        if self._depth == 0 and not self._quoted and character in '}]"':
            self._end_value()
        return 1

    def _end_value(self) -> None:
        self.state = "comma"
        if self._key == "name" and not self._name:
            try:
                name = json.loads(self._value)
            except ValueError:
                name = None
            if isinstance(name, str) and name in self._names:
                self._name = name
            else:
                self.state = "wrong"
        self._key = ""


class CallReader(SteppedReader):
    """Finds calls in the text of a turn as it comes. What is no call of one of the functions `names` is text.

    White space beside a call belongs to nothing. A subclass has the marks of its format: it sets `_held`, the text
    that was not read so far, and `_state`.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._state: Literal["text", "call", "after", "rest"] = "text"
        """Outside of calls, in one, after one; or in text in which calls are not looked for any more."""
        self._scanner = CallScanner(names)
        self._before = ""
        """What was read before the call and is text if it turns out to be no call."""
        self._called = False

    def finish(self) -> list[TurnDelta]:
        held, self._held = self._held, ""
        if self._state == "call" and not self._scanner.begun:
            held = self._before + self._scanner.raw + held
        elif self._state == "after" and not self._called:
            held = self._before + held
        elif self._state in ("call", "after") or (self._called and not held.strip()):
            return []
        return [ContentDelta(held)] if held else []

    def _step(self, parts: list[TurnDelta]) -> bool:
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

    def _read_call(self, parts: list[TurnDelta]) -> bool:
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

    def _say(self, parts: list[TurnDelta], size: int) -> None:
        """Pass on the first `size` characters of what is held."""
        if size:
            parts.append(ContentDelta(self._held[:size]))
            self._held = self._held[size:]

    @abstractmethod
    def _find(self, parts: list[TurnDelta]) -> bool:
        """Look for the next call, and pass on text before it. -> whether there is more to read"""

    @abstractmethod
    def _leave(self) -> bool:
        """Read what stands after a call. -> whether there is more to read"""

    @abstractmethod
    def _mistaken(self, parts: list[TurnDelta]) -> None:
        """The held text began like a call and is none: pass on as much of it as cannot begin another one."""


class MarkedReader(CallReader):
    """Reads formats whose calls follow a mark, which may come anywhere in a turn."""

    mark: str

    def _find(self, parts: list[TurnDelta]) -> bool:
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

    def _mistaken(self, parts: list[TurnDelta]) -> None:
        self._say(parts, len(self._before))
