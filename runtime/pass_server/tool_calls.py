"""Tool calls: the formats of families of models, readers that find them in a turn while the model
writes it, and grammar rules that require them."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
State = Literal["before", "key", "in key", "colon", "value", "in value", "comma", "done", "invalid"]
"""What comes next: the opening brace ("before"), the named part, or the closing brace."""


class CallScanner:
    """Reads the JSON object of a call, character by character, as its arguments may be no JSON.

    begun: whether the function is known, and its arguments have started or the object has ended.
    state: "invalid" once the text is not that of a call; a call that has begun ends there. raw: all
    text that was read."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.state: State = "before"
        self.begun = False
        self.raw = ""
        self._name = ""
        self._key = self._value = ""  # the key and the value that are being read
        self._unsent = ""
        self._arguments_started = False
        self._value_ended = False  # whether any field has been read to its end
        self._depth, self._quoted, self._escaped = 0, False, False

    @property
    def begins_call(self) -> bool:
        """Whether the text so far names a function, or its first field can still do so."""
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
        """Read `text`. Return (its deltas, the text after the object)."""
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
            self._unsent = "{}"  # Clients expect JSON.
        if self.begun and self._unsent:
            deltas.append(ArgumentsDelta(self._unsent))
            self._unsent = ""
        return deltas, text[offset:]

    def _read(self, character: str) -> int:
        """Read a character. Return 0 if the new state has to read it again, else 1."""
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


@dataclass(frozen=True)
class Function:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class CallFormat(ABC):
    """A format of tool calls.

    name: for --tool-call-parser. markers: the texts around calls, which the reader gets even if
    they are special tokens. template_signs, foreign_signs: texts that every chat template of this
    format contains, or only those of others. parallel: whether a turn may have several calls."""

    name: str
    markers: tuple[str, ...]
    template_signs: tuple[str, ...]
    foreign_signs: tuple[str, ...] = ()
    arguments_key = "arguments"
    parallel = True

    @abstractmethod
    def reader(self, names: Collection[str]) -> CallReader:
        """Return a reader for one turn that may call the functions `names`."""

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

    name, markers, template_signs = "hermes", ("<tool_call>", "</tool_call>"), ("<tool_call>",)
    foreign_signs = ("<function=", "<arg_key>")

    def reader(self, names: Collection[str]) -> CallReader:
        return _HermesReader(names)

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        opening, closing = (terminal(marker) for marker in self.markers)
        marked_call = f'{opening} "\\n" call "\\n" {closing}'
        return f'{marked_call} ("\\n" {marked_call})*' if parallel else marked_call


class _HermesReader(MarkedReader):
    """Also reads calls without markers at the beginning of a turn: Qwen2.5-Coder writes them."""

    marker, closing = Hermes.markers
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


class Mistral(CallFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`"""

    name, markers, template_signs = "mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)
    foreign_signs = ("[ARGS]",)

    def reader(self, names: Collection[str]) -> CallReader:
        return _MistralReader(names)

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        further_calls = ' (", " call)*' if parallel else ""
        return f'{terminal(self.markers[0])} " [" call{further_calls} "]"'

    def new_id(self) -> str:
        """Return nine letters and digits: Mistral's chat templates require such ids."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _MistralReader(MarkedReader):
    marker = Mistral.markers[0]
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


class Llama3Json(CallFormat):
    """`{"name": ..., "parameters": {...}}`, perhaps after the marker, is the whole turn. Models
    write further calls after `;`, too."""

    name, markers = "llama3_json", ("<|python_tag|>",)
    template_signs = ('"parameters": ', "<|start_header_id|>")
    arguments_key = "parameters"
    parallel = False

    def reader(self, names: Collection[str]) -> CallReader:
        return _Llama3Reader(names)

    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:  # noqa: ARG002
        return "call"


class _Llama3Reader(CallReader):
    marker = Llama3Json.markers[0]

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


FORMATS: Mapping[str, CallFormat] = {
    form.name: form for form in (Hermes(), Llama3Json(), Mistral())
}


def format_of(template: str) -> CallFormat | None:
    return next((form for form in FORMATS.values() if form.matches_template(template)), None)
