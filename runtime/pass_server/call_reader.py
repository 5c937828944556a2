"""Splits a turn into content and tool calls while the model writes it.

`CallReader` finds the places where a call may be, and `CallScanner` reads the JSON object there. A
text that turns out to be no call is content.
"""

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
"""The keys that a call's arguments have in the formats."""
JSON_WHITESPACE = " \t\r\n"
State = Literal["before", "key", "in key", "colon", "value", "in value", "comma", "done", "invalid"]
"""What comes next: the object's opening brace ("before"), the part that is named or, at "key" and
"comma", the closing brace; for "in ...", the rest of a part."""


class CallScanner:
    """Reads the JSON object of a call, character by character. The call has begun (`begun`) once
    its function is known and its arguments have started, or the object has ended without any. From
    then on the arguments are passed on as the model writes them.

    names: the functions that may be called. state: "invalid" once the text is not that of a call; a
    call that has begun ends there. raw: all text that was read.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.state: State = "before"
        self.begun = False
        self.raw = ""
        self._name = ""
        self._key = self._value = ""  # the key and the value that are being read
        self._unsent = ""  # arguments that are in no delta so far
        self._arguments_started = False
        self._value_ended = False  # whether any field has been read to its end
        # The open brackets in the value; whether a string is open, and its next character escaped.
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def begins_call(self) -> bool:
        """Whether the text so far begins like a call: it names a function, or its first field can
        still become `name` with the name of a function."""
        if self._name or not self.raw.strip("{" + JSON_WHITESPACE):  # named, or without any field
            return True
        if self._value_ended or not "name".startswith(self._key):  # the first field is another one
            return False
        names = [json.dumps(name) for name in self._names]
        return self.state != "in value" or any(name.startswith(self._value) for name in names)

    @property
    def ended(self) -> bool:
        return self.state in ("done", "invalid")

    def push(self, text: str) -> tuple[list[TurnDelta], str]:
        """Read `text`. Return (the deltas that are certain now, the text after the object)."""
        deltas: list[TurnDelta] = []
        offset = 0
        while offset < len(text) and not self.ended:
            offset += self._read(text[offset])
            is_call = self._name and (self._arguments_started or self.state == "done")
            if is_call and not self.begun and self.state != "invalid":
                self.begun = True
                deltas.append(ToolCallStart(self._name))
        self.raw += text[:offset]
        if self.begun and self.state == "done" and not self._arguments_started:
            self._unsent = "{}"  # The object has no arguments, but clients expect JSON.
        if self.begun and self._unsent:
            deltas.append(ArgumentsDelta(self._unsent))
            self._unsent = ""
        return deltas, text[offset:]

    def _read(self, character: str) -> int:
        """Read a character. Return 1, or 0 if the new state has to read this character again."""
        if self.state == "in key":
            return self._read_key(character)
        if self.state == "in value":
            return self._read_value(character)
        if character in JSON_WHITESPACE:
            return 1
        if self.state == "value":
            return self._begin_value(character)
        next_states = {
            ("before", "{"): "key",
            ("key", '"'): "in key",
            ("key", "}"): "done",  # after a trailing comma
            ("colon", ":"): "value",
            ("comma", ","): "key",
            ("comma", "}"): "done",
        }
        next_state = next_states.get((self.state, character))
        if next_state is None or (next_state == "done" and not self._name):
            self.state = "invalid"
            return 0
        self.state = next_state  # type: ignore[assignment]
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
            if character != "{" or self._arguments_started:  # no object, or the second one
                self.state = "invalid"
            else:
                self._arguments_started = True
        return 0

    def _read_value(self, character: str) -> int:
        is_outside = not self._quoted and self._depth == 0
        if is_outside and self._value and character in ",}]" + JSON_WHITESPACE:
            self._end_value()  # The value was a number, true, false or null.
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
        self.state, self._value_ended = "comma", True
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

    Subclasses know where their formats have calls: their methods take what they read out of `_held`
    and set `_state`. marker: the text that announces calls; some formats have calls without it too.
    """

    marker: str

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._state: Literal["text", "call", "after", "rest"] = "text"
        """text: look for a call. call: in what may be a call. after: after a call, or in Mistral's
        format after the marker, before the first call. rest: all that follows is content."""
        self._scanner = CallScanner(names)
        self._before = ""
        """The marker and white space before the object that is read: content if that is no call."""
        self._called = False  # whether any call has begun

    def finish(self, *, cut: bool = False) -> list[TurnDelta]:
        held, self._held = self._held, ""
        has_marker = bool(self._before.strip())
        if self._state == "call" and not self._scanner.begun:
            # What would have become a call if the text had not been cut off is no content.
            dropped = cut and (has_marker or self._scanner.begins_call)
            held = "" if dropped else self._before + self._scanner.raw + held
        elif self._state == "after" and not self._called:  # a marker without a call
            held = "" if cut and has_marker else self._before + held
        elif self._state in ("call", "after") or (self._called and (cut or not held.strip())):
            return []  # Behind a call only white space is left, or what was cut off.
        # With the brace, a whole marker at the end is found too: the cut came before its call.
        marker_length = overlap(held, self.marker + "{") if cut else 0
        if marker_length > 1:  # a single character may be the beginning of anything
            held = held[:-marker_length].rstrip()
        return [ContentDelta(held)] if held else []

    def _step(self, deltas: list[TurnDelta]) -> bool:
        if self._state == "call":
            return self._read_call(deltas)
        if self._state == "after":
            return self._read_after_call()
        if self._state == "text":
            return self._find_call(deltas)
        self._emit_text(deltas, len(self._held))
        return False

    def _begin_call(self, before: str, held: str) -> None:
        """Read `held` as a call from now on. before: the marker and the white space before it."""
        self._scanner = CallScanner(self._names)
        self._before, self._held, self._state = before, held, "call"

    def _read_call(self, deltas: list[TurnDelta]) -> bool:
        scanner = self._scanner
        call_deltas, self._held = scanner.push(self._held)
        deltas += call_deltas
        if not scanner.ended:
            return False
        self._called |= scanner.begun
        if scanner.begun:
            self._state = "after"
        else:
            self._held, self._state = self._before + scanner.raw + self._held, "text"
            self._reject_call(deltas)
        return True

    def _emit_text(self, deltas: list[TurnDelta], size: int) -> None:
        """Pass on the first `size` characters of `_held` as content."""
        if size:
            deltas.append(ContentDelta(self._held[:size]))
            self._held = self._held[size:]

    @abstractmethod
    def _find_call(self, deltas: list[TurnDelta]) -> bool:
        """Find the next call, and pass on the content before it. Return as `_step` does."""

    @abstractmethod
    def _read_after_call(self) -> bool:
        """Read what follows a call. Return as `_step` does."""

    @abstractmethod
    def _reject_call(self, deltas: list[TurnDelta]) -> None:
        """Handle `_held`, which is no call after all: pass on as content what cannot begin another
        call, or set the state "rest", in which all is passed on."""


class MarkedReader(CallReader):
    """Reads formats whose calls follow a marker anywhere in a turn."""

    def _find_call(self, deltas: list[TurnDelta]) -> bool:
        before, marker, after = self._held.partition(self.marker)
        if marker:
            content = before.rstrip()
            self._emit_text(deltas, len(content))
            self._after_marker(before.removeprefix(content) + marker, after)
            return True
        # The beginning of a marker is held back, and white space, which is dropped before a call.
        certain = self._held[: len(self._held) - overlap(self._held, self.marker)].rstrip()
        self._emit_text(deltas, len(certain))
        return False

    def _after_marker(self, before: str, held: str) -> None:
        """Set the state after a marker. before: the marker and the white space before it."""
        self._begin_call(before, held)

    def _reject_call(self, deltas: list[TurnDelta]) -> None:
        self._emit_text(deltas, len(self._before))  # A call may follow another marker in the rest.
