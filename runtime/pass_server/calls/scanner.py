"""One call, `{"name": ..., "arguments": {...}}`, read while it is written."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from pass_server.parts import Arguments, CallBegun, Part

ARGUMENTS = ("arguments", "parameters")
"""The names of the field with the arguments, in any format."""
State = Literal["before", "key", "in key", "colon", "value", "in value", "comma", "done", "wrong"]
SPACE = " \t\r\n"


class CallScanner:
    """Reads the object character by character. A call begins once its function is known and its arguments have begun;
    from then on they are passed on as they come, spelled as the model spells them.

    state: "wrong" where the text is no call of one of the functions `names`, as soon as that is certain. begun: whether
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

    def push(self, text: str) -> tuple[list[Part], str]:
        """-> (what became known, the text after the object)"""
        parts: list[Part] = []
        place = 0
        while place < len(text) and not self.ended:
            place += self._read(text[place])
            if not self.begun and self.state != "wrong" and self._name and (self._arguments or self.state == "done"):
                self.begun = True
                parts.append(CallBegun(self._name))
        self.raw += text[:place]
        if self.begun and self.state == "done" and not self._arguments:
            self._unsent = "{}"
        if self.begun and self._unsent:
            parts.append(Arguments(self._unsent))
            self._unsent = ""
        return parts, text[place:]

    def _read(self, character: str) -> int:
        """-> how many characters were read: 1, or 0 where the state changed only"""
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
