"""Tool calls: the formats of families of models, readers that find them in a turn while the model
writes it, and grammar rules that require them."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pass_runtime import Constraint
from pass_server.turn_reader import (
    ArgumentsDelta,
    ContentDelta,
    SteppedReader,
    ToolCallStart,
    TurnDelta,
    overlap,
)

ARGUMENTS_KEYS = ("arguments", "parameters")
JSON_WHITESPACE = " \t\r\n"
T = TypeVar("T")
Characters = Generator[None, str, T]
"""Gets a text by its characters."""


class CallScanner:
    """Reads the JSON object of a call, character by character, as its arguments may be no JSON.

    begun: whether the function is known, and its arguments have started or the object has ended.
    ended: the object has, or the text is not that of a call. raw: all text that was read."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.begun = self.ended = False
        self.raw = ""
        self._name = ""
        self._key = self._value = ""  # the key and the value that are being read
        self._value_ended = False  # whether any field has been read to its end
        self._arguments_started = False
        self._unsent = ""
        self._object = self._read_object()
        next(self._object)

    @property
    def begins_call(self) -> bool:
        """Whether the text so far names a function, or its first field can still do so."""
        if self._name or not self.raw.strip("{" + JSON_WHITESPACE):  # named, or without any field
            return True
        if self._value_ended or not "name".startswith(self._key):  # the first field is another one
            return False
        return any(json.dumps(name).startswith(self._value) for name in self._names)

    def push(self, text: str) -> tuple[list[TurnDelta], str]:
        """Read `text`. Return (its deltas, the text after the object)."""
        deltas: list[TurnDelta] = []
        offset = 0
        is_whole = False
        while offset < len(text) and not self.ended:
            try:
                self._object.send(text[offset])
                offset += 1
            except StopIteration as end:
                self.ended, is_whole = True, end.value
                offset += 1 if is_whole else 0
            if self._name and not self.begun and (self._arguments_started or is_whole):
                self.begun = True
                deltas.append(ToolCallStart(self._name))
        self.raw += text[:offset]
        if is_whole and not self._arguments_started:
            self._unsent = "{}"  # Clients expect JSON.
        if self.begun and self._unsent:
            deltas.append(ArgumentsDelta(self._unsent))
            self._unsent = ""
        return deltas, text[offset:]

    def _read_object(self) -> Characters[bool]:
        """Return whether the object is that of a call, at its end or before the wrong character."""
        if (yield from _after_space()) != "{":
            return False
        separator = ","
        while separator == ",":
            character = yield from _after_space()
            if character == "}":  # after a trailing comma
                return bool(self._name)
            if character != '"':
                return False
            self._key = self._value = ""
            while (character := (yield)) != '"':
                self._key += character
            if (yield from _after_space()) != ":":
                return False
            character = yield from _after_space()
            if self._key in ARGUMENTS_KEYS:
                if character != "{" or self._arguments_started:  # no object, or the second one
                    return False
                self._arguments_started = True
            following = yield from self._read_value(character)
            if self._key == "name" and not self._name:
                with suppress(ValueError):
                    self._name = next((n for n in self._names if n == json.loads(self._value)), "")
                if not self._name:
                    return False
            self._value_ended = True
            separator = yield from _after_space(following)
        return separator == "}" and bool(self._name)

    def _read_value(self, character: str) -> Characters[str]:
        """Return the character behind a number, true, false or null; "" behind other values."""
        depth, quoted, escaped = 0, False, False
        while True:
            is_outside = not quoted and depth == 0
            if is_outside and self._value and character in ",}]" + JSON_WHITESPACE:
                return character
            self._value += character
            if self._key in ARGUMENTS_KEYS:
                self._unsent += character
            if quoted:
                quoted = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                quoted = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not quoted and character in '}]"':
                return ""
            character = yield


def _after_space(character: str = "") -> Characters[str]:
    while character in JSON_WHITESPACE:  # also ""
        character = yield
    return character


class CallReader(SteppedReader):
    """Finds calls of the functions `names` in a turn; everything else is content, but for white
    space beside a call. Subclasses know where their formats have calls. marker: announces calls."""

    marker: str

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._state: Literal["text", "call", "after", "rest"] = "text"
        """text: look for a call. call: in what may be one. after: behind it, or Mistral's marker.
        rest: all that follows is content."""
        self._scanner = CallScanner(names)
        self._before = ""
        """What precedes the object that is read: content if that is no call."""
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
        # With the brace, a whole marker at the end is found, too.
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
        """Read `held` as a call from now on. before: the marker and white space."""
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
        if size:
            deltas.append(ContentDelta(self._held[:size]))
            self._held = self._held[size:]

    @abstractmethod
    def _find_call(self, deltas: list[TurnDelta]) -> bool:
        """Find the next call, and pass on the content before it. Returns as `_step`."""

    @abstractmethod
    def _read_after_call(self) -> bool:
        """Read what follows a call. Returns as `_step`."""

    def _reject_call(self, deltas: list[TurnDelta]) -> None:  # noqa: ARG002
        """Pass on as content what cannot begin another call."""
        self._state = "rest"


class MarkedReader(CallReader):
    def _find_call(self, deltas: list[TurnDelta]) -> bool:
        before, marker, after = self._held.partition(self.marker)
        if marker:
            content = before.rstrip()
            self._emit_text(deltas, len(content))
            self._after_marker(before.removeprefix(content) + marker, after)
            return True
        certain = self._held[: len(self._held) - overlap(self._held, self.marker)].rstrip()
        self._emit_text(deltas, len(certain))
        return False

    def _after_marker(self, before: str, held: str) -> None:
        self._begin_call(before, held)

    def _reject_call(self, deltas: list[TurnDelta]) -> None:
        self._emit_text(deltas, len(self._before))  # A call may follow another marker in the rest.


class _HermesReader(MarkedReader):
    """Also reads calls without markers at the beginning of a turn: Qwen2.5-Coder writes them."""

    marker, closing = "<tool_call>", "</tool_call>"
    _unmarked_allowed = True  # whether the next call may have no markers

    def _find_call(self, deltas: list[TurnDelta]) -> bool:
        stripped = self._held.lstrip()
        if self._unmarked_allowed and not stripped:
            return False
        if self._unmarked_allowed and stripped[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(stripped)], stripped)
            return True
        self._unmarked_allowed = False
        return super()._find_call(deltas)

    def _reject_call(self, deltas: list[TurnDelta]) -> None:
        self._unmarked_allowed = False
        super()._reject_call(deltas)

    def _read_after_call(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(self.closing):
            self._held, self._unmarked_allowed = rest.removeprefix(self.closing), False
            return True
        if self.closing.startswith(rest):  # white space, or the beginning of the closing marker
            return False
        self._held, self._state = rest, "text"
        return True


class _MistralReader(MarkedReader):
    marker = "[TOOL_CALLS]"
    _in_list = False  # whether the list's opening bracket was read

    def _after_marker(self, before: str, held: str) -> None:
        self._before, self._held, self._state, self._in_list = before, held, "after", False

    def _read_after_call(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if not self._in_list and rest[0] == "[":
            self._before, self._held, self._in_list = self._before + " [", rest[1:], True
        elif self._in_list and rest[0] == "{":
            # After a first call, the marker and the bracket are part of that call.
            self._begin_call("" if self._called else self._before, rest)
        elif self._in_list and self._called and rest[0] == ",":
            self._held = rest[1:]
        elif self._called:  # the end of the list
            self._held, self._state = rest.removeprefix("]").lstrip(), "text"
        else:  # what follows the marker is no list of calls
            self._held, self._state = self._before + self._held, "rest"
        return True

    def _reject_call(self, deltas: list[TurnDelta]) -> None:
        CallReader._reject_call(self, deltas)


class _Llama3Reader(CallReader):
    marker = "<|python_tag|>"

    def _find_call(self, deltas: list[TurnDelta]) -> bool:  # noqa: ARG002
        return self._read_start(self._held.lstrip())

    def _read_after_call(self) -> bool:
        return self._read_start(self._held.lstrip(" \n;"))

    def _read_start(self, rest: str) -> bool:
        """Begin a call if `rest`, the end of `_held`, starts with one, else read it as content."""
        unmarked = rest.removeprefix(self.marker).lstrip()
        if not unmarked or self.marker.startswith(rest):
            return False
        if unmarked[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(unmarked)], unmarked)
        else:
            self._state = "rest"
            if self._called:
                self._held = rest  # without the white space behind the call
        return True


@dataclass(frozen=True)
class Function:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class CallFormat(ABC):
    """A format of tool calls.

    name: for --tool-call-parser. reader: of one turn, given the functions' names. markers: the
    texts around calls, which the reader gets even if they are special tokens. template_signs,
    foreign_signs: texts that every chat template of this format contains, or only those of others.
    parallel: whether a turn may have several calls."""

    name: str
    reader: type[CallReader]
    markers: tuple[str, ...]
    template_signs: tuple[str, ...]
    foreign_signs: tuple[str, ...] = ()
    arguments_key = "arguments"
    parallel = True

    @abstractmethod
    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        """Return the Lark rule for one call with its markers, or several if `parallel`, in which
        `call` stands for the JSON object. terminal: returns the Lark terminal of a marker."""

    def new_id(self) -> str:
        return f"call_{secrets.token_hex(12)}"

    def matches_template(self, template: str) -> bool:
        foreign = any(sign in template for sign in self.foreign_signs)
        return not foreign and all(sign in template for sign in self.template_signs)

    def rules(
        self, functions: Sequence[Function], terminal: Callable[[str], str], *, parallel: bool
    ) -> str:
        """Return Lark rules for a turn that calls these functions. The first is `calls`."""
        lines = [f"calls: {self.calls_rule(terminal, parallel=parallel and self.parallel)}"]
        lines.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            opening = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            lines.append(f'call{i}: {json.dumps(opening)} arguments{i} "}}"')
            schema = {"type": "object", **function.parameters, "title": function.name}
            lines.append(Constraint(json_schema=schema).lark(f"arguments{i}"))
        return "\n".join(lines)


class Hermes(CallFormat):
    """Hermes and Qwen: any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    name, reader = "hermes", _HermesReader
    markers, template_signs = ("<tool_call>", "</tool_call>"), ("<tool_call>",)
    foreign_signs = ("<function=", "<arg_key>")

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        opening, closing = (terminal(marker) for marker in self.markers)
        marked_call = f'{opening} "\\n" call "\\n" {closing}'
        return f'{marked_call} ("\\n" {marked_call})*' if parallel else marked_call


class Mistral(CallFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`"""

    name, reader = "mistral", _MistralReader
    markers, template_signs = ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)
    foreign_signs = ("[ARGS]",)

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        further_calls = ' (", " call)*' if parallel else ""
        return f'{terminal(self.markers[0])} " [" call{further_calls} "]"'

    def new_id(self) -> str:
        """Return nine letters and digits: Mistral's chat templates require such ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class Llama3Json(CallFormat):
    """`{"name": ..., "parameters": {...}}`, perhaps after the marker, is the whole turn. Models
    write further calls after `;`, too."""

    name, reader, markers = "llama3_json", _Llama3Reader, ("<|python_tag|>",)
    template_signs = ('"parameters": ', "<|start_header_id|>")
    arguments_key = "parameters"
    parallel = False

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:  # noqa: ARG002
        return "call"


FORMATS: Mapping[str, CallFormat] = {
    form.name: form for form in (Hermes(), Llama3Json(), Mistral())
}


def format_of(template: str) -> CallFormat | None:
    return next((form for form in FORMATS.values() if form.matches_template(template)), None)
