"""The formats in which families of models write tool calls: the reader and the grammar of each."""

from __future__ import annotations

import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pass_runtime import Constraint
from pass_server.call_reader import CallReader, MarkedReader
from pass_server.turn_reader import TurnDelta


@dataclass(frozen=True)
class Function:
    """A function that may be called. parameters: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class CallFormat(ABC):
    """A format of tool calls. name: its name in --tool-call-parser. markers: texts around calls,
    which the reader gets even if they are special tokens. template_signs: texts in every chat
    template of this format. foreign_signs: texts only in templates of other formats. arguments_key:
    the key of a call's arguments. parallel: whether a turn may have several calls."""

    name: str
    markers: tuple[str, ...]
    template_signs: tuple[str, ...]
    foreign_signs: tuple[str, ...] = ()
    arguments_key = "arguments"
    parallel = True

    @abstractmethod
    def reader(self, names: Collection[str]) -> CallReader:
        """A reader for one turn, which may call the functions `names`."""

    @abstractmethod
    def calls_rule(self, terminal: Callable[[str], str], *, parallel: bool) -> str:
        """The right side of the Lark rule for one call, or several if `parallel`. It uses the rule
        `call`: a call's JSON object. terminal: maps a marker to its Lark terminal."""

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def matches_template(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        foreign = any(sign in template for sign in self.foreign_signs)
        return not foreign and all(sign in template for sign in self.template_signs)

    def rules(
        self, functions: Sequence[Function], terminal: Callable[[str], str], *, parallel: bool
    ) -> str:
        """Lark rules for a turn that calls some of these functions. The first rule is `calls`."""
        lines = [f"calls: {self.calls_rule(terminal, parallel=parallel and self.parallel)}"]
        lines.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            begins = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            lines.append(f'call{i}: {json.dumps(begins)} arguments{i} "}}"')
            # The title names the function in errors.
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
        one = f'{opening} "\\n" call "\\n" {closing}'
        return f'{one} ("\\n" {one})*' if parallel else one


class _HermesReader(MarkedReader):
    """Reads calls with markers, and calls without them at the beginning of a turn: small models
    such as Qwen2.5-Coder leave them out."""

    marker, closing = Hermes.markers
    _unmarked_allowed = True  # whether the next call may have no markers

    def _find_call(self, parts: list[TurnDelta]) -> bool:
        rest = self._held.lstrip()
        if self._unmarked_allowed and not rest:
            return False
        if self._unmarked_allowed and rest[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(rest)], rest)
            return True
        self._unmarked_allowed = False
        return super()._find_call(parts)

    def _reject_call(self, parts: list[TurnDelta]) -> None:
        self._unmarked_allowed = False
        super()._reject_call(parts)

    def _read_after_call(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(self.closing):
            self._held, self._unmarked_allowed = rest.removeprefix(self.closing), False
            return True
        if self.closing.startswith(rest):
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
        more = ' (", " call)*' if parallel else ""
        return f'{terminal(self.markers[0])} " [" call{more} "]"'

    def new_id(self) -> str:
        """Nine letters and digits, as Mistral's chat templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _MistralReader(MarkedReader):
    marker = Mistral.markers[0]
    _in_list = False  # whether the list's bracket was read

    def _after_marker(self, before: str, held: str) -> None:
        self._before, self._held, self._state, self._in_list = before, held, "after", False

    def _read_after_call(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if not self._in_list and rest[0] == "[":
            self._before, self._held, self._in_list = self._before + " [", rest[1:], True
        elif self._in_list and rest[0] == "{":
            self._begin_call("" if self._called else self._before, rest)
        elif self._in_list and self._called and rest[0] == ",":
            self._held = rest[1:]
        elif self._called:
            self._held, self._state = rest.removeprefix("]").lstrip(), "text"
        else:
            self._held, self._state = self._before + self._held, "rest"
        return True

    def _reject_call(self, parts: list[TurnDelta]) -> None:  # noqa: ARG002
        self._state = "rest"


class Llama3Json(CallFormat):
    """`{"name": ..., "parameters": {...}}` as the whole turn. More calls after `;` are read too."""

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

    def _find_call(self, parts: list[TurnDelta]) -> bool:  # noqa: ARG002
        return self._begin(self._held.lstrip())

    def _read_after_call(self) -> bool:
        return self._begin(self._held.lstrip(" \n;"))

    def _begin(self, rest: str) -> bool:
        """Begin the call at the start of `rest`, or read it as content. Returns as `_find_call`."""
        call = rest.removeprefix(self.marker).lstrip()
        if not call or self.marker.startswith(rest):
            return False
        if call[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(call)], call)
        else:
            self._held = rest if self._called else self._held
            self._state = "rest"
        return True

    def _reject_call(self, parts: list[TurnDelta]) -> None:  # noqa: ARG002
        self._state = "rest"


FORMATS: Mapping[str, CallFormat] = {
    form.name: form for form in (Hermes(), Llama3Json(), Mistral())
}
"""By name."""


def format_of(template: str) -> CallFormat | None:
    """The format in which a chat template writes tool calls; None if it is none of FORMATS."""
    return next((form for form in FORMATS.values() if form.matches_template(template)), None)
