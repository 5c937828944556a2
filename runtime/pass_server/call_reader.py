"""Splits a turn into content and tool calls while it is written."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection
from typing import Literal

from pass_server.turn_reader import (
    ArgumentsDelta,
    ContentDelta,
    SteppedReader,
    ToolCallStart,
    TurnDelta,
    overlap,
)

ARGUMENTS_KEYS = ("arguments", "parameters")
"""The keys of the arguments in a call, over all formats."""
State = Literal["before", "key", "in key", "colon", "value", "in value", "comma", "done", "invalid"]
JSON_WHITESPACE = " \t\r\n"


class CallScanner:
    """Reads the JSON object of a call, character by character. The call begins once its function is
    known and its arguments have begun; from then on the arguments are passed on as the model writes
    them.

    names: the functions that may be called. state: what comes next; "invalid" once the text cannot
    be a call, and where a call that has begun ends. begun: whether the call has begun. raw: all
    text that was read.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.state: State = "before"
        self.begun = False
        self.raw = ""
        self._name = ""
        self._key = self._value = self._unsent = ""  # _unsent: arguments that no delta has yet
        self._arguments = False  # whether the value of the arguments has begun
        self._other_keys = False  # whether a value has ended
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def begins_call(self) -> bool:
        """Whether the text so far names a function, or may do so first of all."""
        if self._name or not self.raw.strip("{" + JSON_WHITESPACE):
            return True
        if self._other_keys or not "name".startswith(self._key):
            return False
        return self.state != "in value" or any(
            json.dumps(name).startswith(self._value) for name in self._names
        )

    @property
    def ended(self) -> bool:
        return self.state in ("done", "invalid")

    def push(self, text: str) -> tuple[list[TurnDelta], str]:
        """Read `text`. Returns (the deltas that are certain now, the text after the object)."""
        parts: list[TurnDelta] = []
        offset = 0
        while offset < len(text) and not self.ended:
            offset += self._read(text[offset])
            begins = self._name and (self._arguments or self.state == "done")
            if begins and not self.begun and self.state != "invalid":
                self.begun = True
                parts.append(ToolCallStart(self._name))
        self.raw += text[:offset]
        if self.begun and self.state == "done" and not self._arguments:
            self._unsent = "{}"
        if self.begun and self._unsent:
            parts.append(ArgumentsDelta(self._unsent))
            self._unsent = ""
        return parts, text[offset:]

    def _read(self, character: str) -> int:
        """Returns 1, or 0 if only the state changed, so that the character is to be read again."""
        if self.state == "in key":
            return self._read_key(character)
        if self.state == "in value":
            return self._read_value(character)
        if character in JSON_WHITESPACE:
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
            self.state = "invalid"
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
        if self._key in ARGUMENTS_KEYS:
            if character != "{" or self._arguments:
                self.state = "invalid"
            else:
                self._arguments = True
        return 0

    def _read_value(self, character: str) -> int:
        outside = not self._quoted and self._depth == 0
        if outside and self._value and character in ",}]" + JSON_WHITESPACE:
            self._end_value()
            return 0
        self._value += character
        if self._key in ARGUMENTS_KEYS:
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
        self.state, self._other_keys = "comma", True
        if self._key == "name" and not self._name:
            try:
                name = json.loads(self._value)
            except ValueError:
                name = None
            if isinstance(name, str) and name in self._names:
                self._name = name
            else:
                self.state = "invalid"
        self._key = ""


class CallReader(SteppedReader):
    """Finds calls of the functions `names` in a turn; everything else is content. White space
    beside a call is dropped.

    A subclass knows the markers of its format, and sets `_held`, the text that was not read so far,
    and `_state`. marker: what calls begin with.
    """

    marker: str

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._state: Literal["text", "call", "after", "rest"] = "text"
        """text: outside of calls. call: in a call. after: after a call or Mistral's marker. rest:
        only content follows."""
        self._scanner = CallScanner(names)
        self._before = ""
        """The text before the object of the call. It is content if there is no call."""
        self._called = False  # whether a call has begun

    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        held, self._held = self._held, ""
        marked = bool(self._before.strip())  # a marker was read
        if self._state == "call" and not self._scanner.begun:
            dropped = cut and (marked or self._scanner.begins_call)
            held = "" if dropped else self._before + self._scanner.raw + held
        elif self._state == "after" and not self._called:
            held = "" if cut and marked else self._before + held
        elif self._state in ("call", "after") or (self._called and (cut or not held.strip())):
            return []
        size = overlap(held, self.marker + "{") if cut else 0
        if size > 1:  # a single character may be the beginning of anything
            held = held[:-size].rstrip()
        return [ContentDelta(held)] if held else []

    def _step(self, parts: list[TurnDelta]) -> bool:
        if self._state == "call":
            return self._read_call(parts)
        if self._state == "after":
            return self._read_after_call()
        if self._state == "text":
            return self._find_call(parts)
        self._emit_text(parts, len(self._held))
        return False

    def _begin_call(self, before: str, held: str) -> None:
        self._scanner = CallScanner(self._names)
        self._before, self._held, self._state = before, held, "call"

    def _read_call(self, parts: list[TurnDelta]) -> bool:
        scanner = self._scanner
        deltas, self._held = scanner.push(self._held)
        parts += deltas
        if not scanner.ended:
            return False
        self._called |= scanner.begun
        if scanner.begun:
            self._state = "after"
        else:
            self._held, self._state = self._before + scanner.raw + self._held, "text"
            self._reject_call(parts)
        return True

    def _emit_text(self, parts: list[TurnDelta], size: int) -> None:
        """Pass on the first `size` characters of `_held` as content."""
        if size:
            parts.append(ContentDelta(self._held[:size]))
            self._held = self._held[size:]

    @abstractmethod
    def _find_call(self, parts: list[TurnDelta]) -> bool:
        """Look for the next call, pass on the content before it, and return as `_step` does."""

    @abstractmethod
    def _read_after_call(self) -> bool:
        """Read what follows a call, and return as `_step` does."""

    @abstractmethod
    def _reject_call(self, parts: list[TurnDelta]) -> None:
        """`_held` is no call after all: pass on the text that cannot begin another call."""


class MarkedReader(CallReader):
    """Reads formats whose calls follow a marker anywhere in a turn."""

    def _find_call(self, parts: list[TurnDelta]) -> bool:
        at = self._held.find(self.marker)
        if at >= 0:
            rest = self._held[at + len(self.marker) :]
            shown = self._held[:at].rstrip()
            self._emit_text(parts, len(shown))
            self._after_marker(self._held[: at - len(shown)] + self.marker, rest)
            return True
        text = self._held[: len(self._held) - overlap(self._held, self.marker)]
        self._emit_text(parts, len(text.rstrip()))
        return False

    def _after_marker(self, before: str, held: str) -> None:
        """Set the state after a marker. before: the marker and the white space before it."""
        self._begin_call(before, held)

    def _reject_call(self, parts: list[TurnDelta]) -> None:
        self._emit_text(parts, len(self._before))
