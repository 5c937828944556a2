"""The formats in which families of models write tool calls. Each has a reader, which finds the
calls in a turn, and grammar rules, with which a request can require calls."""

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
    """A function that the model may call. parameters: the JSON schema of the arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class CallFormat(ABC):
    """A format of tool calls.

    name: what --tool-call-parser calls the format. markers: the texts around calls; the reader gets
    them even if they are special tokens, which other text omits. template_signs: texts that every
    chat template of this format contains. foreign_signs: texts that only other formats' have.
    arguments_key: the key of the arguments in a call's JSON object. parallel: whether a turn may
    have several calls.
    """

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
        """Return the right side of the Lark rule for one call with its markers, or for several
        calls if `parallel`. In it the rule `call` stands for a call's JSON object. terminal:
        returns the Lark terminal of a marker."""

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def matches_template(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        foreign = any(sign in template for sign in self.foreign_signs)
        return not foreign and all(sign in template for sign in self.template_signs)

    def rules(
        self, functions: Sequence[Function], terminal: Callable[[str], str], *, parallel: bool
    ) -> str:
        """Return Lark rules for a turn that calls some of these functions. The first is `calls`."""
        lines = [f"calls: {self.calls_rule(terminal, parallel=parallel and self.parallel)}"]
        lines.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            opening = f'{{"name": {json.dumps(function.name)}, "{self.arguments_key}": '
            lines.append(f'call{i}: {json.dumps(opening)} arguments{i} "}}"')
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
        marked_call = f'{opening} "\\n" call "\\n" {closing}'
        return f'{marked_call} ("\\n" {marked_call})*' if parallel else marked_call


class _HermesReader(MarkedReader):
    """Reads calls with markers, and at the beginning of a turn also calls without: small models
    such as Qwen2.5-Coder leave the markers out."""

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
    """Reads the list of calls that follows the marker. `_before` collects the marker and the list's
    bracket, which become content again if no call follows."""

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

    def _reject_call(self, deltas: list[TurnDelta]) -> None:  # noqa: ARG002
        self._state = "rest"


class Llama3Json(CallFormat):
    """`{"name": ..., "parameters": {...}}`, perhaps after the marker, is the whole turn. The reader
    also takes further calls after `;`, which models write although the format has none."""

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
        """Begin a call if `rest`, the end of `_held`, starts with one, else read it as content.
        Return False if more text is needed to decide that."""
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

    def _reject_call(self, deltas: list[TurnDelta]) -> None:  # noqa: ARG002
        self._state = "rest"


FORMATS: Mapping[str, CallFormat] = {
    form.name: form for form in (Hermes(), Llama3Json(), Mistral())
}
"""All formats, by name."""


def format_of(template: str) -> CallFormat | None:
    """Return the format in which a chat template writes tool calls; None if FORMATS lacks it."""
    return next((form for form in FORMATS.values() if form.matches_template(template)), None)
