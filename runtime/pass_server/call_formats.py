"""The formats in which families of models write calls: how each is read, and its grammar."""

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
    """name: what --tool-call-parser calls it. marks: texts that may be special tokens, which are then shown to the
    reader. sign: what a chat template of this format has in it, and foreign: what only those of others have. arguments:
    the field with the arguments. parallel: whether a turn may have several calls."""

    name: str
    marks: tuple[str, ...]
    signs: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    arguments = "arguments"
    parallel = True

    @abstractmethod
    def reader(self, names: Collection[str]) -> CallReader:
        """For the text of one turn that may call the functions `names`."""

    @abstractmethod
    def sequence(self, spelled: Callable[[str], str], *, many: bool) -> str:
        """The right side of a Lark rule for one call, or for one and more; a call's object is the rule `call`.
        spelled: turns a mark into what stands for it in a grammar."""

    def new_id(self) -> str:
        """An id for a call."""
        return f"call_{secrets.token_hex(12)}"

    def is_of(self, template: str) -> bool:
        """Whether a chat template writes calls in this format."""
        return all(sign in template for sign in self.signs) and not any(sign in template for sign in self.foreign)

    def rules(self, functions: Sequence[Function], spelled: Callable[[str], str], *, many: bool) -> str:
        """A grammar's rules for a turn that calls some of these functions; the first of them is `calls`."""
        lines = [f"calls: {self.sequence(spelled, many=many and self.parallel)}"]
        lines.append("call: " + " | ".join(f"call{i}" for i in range(len(functions))))
        for i, function in enumerate(functions):
            begins = f'{{"name": {json.dumps(function.name)}, "{self.arguments}": '
            lines.append(f'call{i}: {json.dumps(begins)} arguments{i} "}}"')
            lines.append(Constraint(json_schema={"type": "object", **function.parameters}).lark(f"arguments{i}"))
        return "\n".join(lines)


class Hermes(CallFormat):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, in Hermes and Qwen."""

    name, marks, signs = "hermes", ("<tool_call>", "</tool_call>"), ("<tool_call>",)
    foreign = ("<function=", "<arg_key>")

    def reader(self, names: Collection[str]) -> CallReader:
        return _HermesReader(names)

    def sequence(self, spelled: Callable[[str], str], *, many: bool) -> str:
        opening, closing = (spelled(mark) for mark in self.marks)
        one = f'{opening} "\\n" call "\\n" {closing}'
        return f'{one} ("\\n" {one})*' if many else one


class _HermesReader(MarkedReader):
    """Small models leave the marks out (Qwen2.5-Coder does): a turn may also begin with such objects alone."""

    mark, closing = Hermes.marks
    _bare = True  # whether a call without marks may follow

    def _find(self, parts: list[TurnDelta]) -> bool:
        rest = self._held.lstrip()
        if self._bare and not rest:
            return False
        if self._bare and rest[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(rest)], rest)
            return True
        self._bare = False
        return super()._find(parts)

    def _mistaken(self, parts: list[TurnDelta]) -> None:
        self._bare = False
        super()._mistaken(parts)

    def _leave(self) -> bool:
        rest = self._held.lstrip()
        if rest.startswith(self.closing):
            self._held, self._bare = rest.removeprefix(self.closing), False
            return True
        if self.closing.startswith(rest):
            return False
        self._held, self._state = rest, "text"
        return True


class Mistral(CallFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`"""

    name, marks, signs = "mistral", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",)
    foreign = ("[ARGS]",)

    def reader(self, names: Collection[str]) -> CallReader:
        return _MistralReader(names)

    def sequence(self, spelled: Callable[[str], str], *, many: bool) -> str:
        more = ' (", " call)*' if many else ""
        return f'{spelled(self.marks[0])} " [" call{more} "]"'

    def new_id(self) -> str:
        """Its chat templates want nine letters and digits."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class _MistralReader(MarkedReader):
    mark = Mistral.marks[0]
    _listed = False  # whether the list's bracket was read

    def _after_mark(self, before: str, held: str) -> None:
        self._before, self._held, self._state, self._listed = before, held, "after", False

    def _leave(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if not self._listed and rest[0] == "[":
            self._before, self._held, self._listed = self._before + " [", rest[1:], True
        elif self._listed and rest[0] == "{":
            self._begin_call("" if self._called else self._before, rest)
        elif self._listed and self._called and rest[0] == ",":
            self._held = rest[1:]
        elif self._called:
            self._held, self._state = rest.removeprefix("]").lstrip(), "text"
        else:
            self._held, self._state = self._before + self._held, "rest"
        return True

    def _mistaken(self, parts: list[TurnDelta]) -> None:  # noqa: ARG002 - the other readers'
        self._state = "rest"


class Llama3Json(CallFormat):
    """`{"name": ..., "parameters": {...}}`, which is the whole turn; further ones after `;` are read too."""

    name, marks, signs = "llama3_json", ("<|python_tag|>",), ('"parameters": ', "<|start_header_id|>")
    arguments = "parameters"
    parallel = False

    def reader(self, names: Collection[str]) -> CallReader:
        return _Llama3Reader(names)

    def sequence(self, spelled: Callable[[str], str], *, many: bool) -> str:  # noqa: ARG002 - the other formats'
        return "call"


class _Llama3Reader(CallReader):
    mark = Llama3Json.marks[0]

    def _find(self, parts: list[TurnDelta]) -> bool:  # noqa: ARG002 - the other readers'
        return self._begin(self._held.lstrip())

    def _leave(self) -> bool:
        return self._begin(self._held.lstrip(" \n;"))

    def _begin(self, rest: str) -> bool:
        call = rest.removeprefix(self.mark).lstrip()
        if not call or self.mark.startswith(rest):
            return False
        if call[0] == "{":
            self._begin_call(self._held[: len(self._held) - len(call)], call)
        else:
            self._held = rest if self._called else self._held
            self._state = "rest"
        return True

    def _mistaken(self, parts: list[TurnDelta]) -> None:  # noqa: ARG002 - the other readers'
        self._state = "rest"


FORMATS: Mapping[str, CallFormat] = {form.name: form for form in (Hermes(), Llama3Json(), Mistral())}
"""By name."""


def format_of(template: str) -> CallFormat | None:
    """The format in which a chat template writes calls; None if it is none of these."""
    return next((form for form in FORMATS.values() if form.is_of(template)), None)
