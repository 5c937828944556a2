"""Chat templates, rendered in this process as transformers renders them: in jinja's sandbox.

Whoever exports a bundle trusts its template: one that loops for ever holds its thread for ever."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from pydantic import BaseModel, ConfigDict

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES
from pass_runtime.errors import PassError

MAX_BYTES = 1 << 25
"""The most bytes of UTF-8 that a template may write."""
WRITTEN_ARGUMENTS = "written_arguments"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]
"""{"role", "content"} and other fields that the template reads. A called function may have
`written_arguments`, which need not be JSON, in place of `arguments`."""


class TextMessage(BaseModel):
    """A message of `pass-run batch`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str

    def plain(self) -> dict[str, str]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class ChatTemplate:
    """The chat templates of a model. Any thread may call its methods."""

    def __init__(
        self, sources: str | Mapping[str, str], tokens: Mapping[str, str] | None = None
    ) -> None:
        """sources: the template, or several by their names in `CHAT_TEMPLATE_FILES`. tokens: the
        special tokens by variable, such as `bos_token`."""
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.tokens = dict(tokens or {})
        self._compiled: dict[str, Template] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.sources, self.tokens)  # Compiled templates cannot be pickled.

    def reads(self, variable: str) -> bool:
        """Whether the source of a template contains this variable's name."""
        name = re.compile(rf"\b{re.escape(variable)}\b")
        return any(name.search(source) for source in self.sources.values())

    @property
    def tool_use_source(self) -> str:
        return self.sources[self._name(tools=True)]

    def check(self) -> None:
        """Compile the templates. Raises PassError if one does not compile."""
        for name in self.sources:
            self._template(name)

    def render(self, messages: Sequence[Message], /, **variables: Any) -> str:
        """Return the prompt for the next turn. Raises PassError if the template does not compile,
        refuses the messages or writes more than MAX_BYTES."""
        if not messages:
            raise PassError("a conversation needs at least one message")
        template = self._template(self._name(tools=variables.get("tools") is not None))
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        variables = {**self.tokens, **defaults, **variables}
        turns = [_message(each) for each in messages]
        try:
            return _rendered(template, {**variables, "messages": turns})
        except PassError:
            if (split := _with_single_calls(turns)) == turns:
                raise
            return _rendered(template, {**variables, "messages": split})

    def _name(self, *, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise PassError(
                "the model's only chat template is for conversations with tools; pass tools"
            )
        return name

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = _ENVIRONMENT.from_string(self.sources[name])
            except Exception as error:
                raise PassError(f"{CHAT_TEMPLATE_FILES[name]}: {_one_line(error)}") from None
        return self._compiled[name]


def load_chat_template(bundle: Path, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Read the bundle's templates. Return None if the model has none."""
    sources = {}
    for name, file in CHAT_TEMPLATE_FILES.items():
        try:
            if (path := bundle / file).is_file():
                sources[name] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise PassError(f"{path} is not UTF-8 text; export the bundle again") from None
    return ChatTemplate(sources, tokens) if sources else None


def _rendered(template: Template, variables: Mapping[str, Any]) -> str:
    parts, size = [], 0
    try:
        for part in template.generate(variables):
            parts.append(part)
            size += len(part.encode(errors="replace"))
            if size > MAX_BYTES:
                break
    except Exception as error:  # A template is a program, and may raise anything.
        raise PassError(f"the chat template refuses these messages: {_one_line(error)}") from None
    if size > MAX_BYTES:
        mib = MAX_BYTES >> 20
        raise PassError(f"the chat template cannot be used: it writes more than {mib} MiB")
    return "".join(parts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _message(message: Any) -> dict[str, Any]:
    """Return a message as transformers passes it to a template: without null fields, and with the
    reasoning under two names. A turn of the model without content gets `NoText`."""
    if not isinstance(message, Mapping):
        raise PassError(
            f"a message must be an object with a role and content, not {str(message)[:40]!r}"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant" and "content" not in fields:
        fields = {"role": "assistant", "content": NoText(), **fields}
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call) for call in fields["tool_calls"]]
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or WRITTEN_ARGUMENTS not in function:
        return call
    others = {name: value for name, value in function.items() if name != WRITTEN_ARGUMENTS}
    written = WrittenArguments(function[WRITTEN_ARGUMENTS])
    return {**call, "function": {**others, "arguments": written}}


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with one call in each, and its results after it: the templates of Llama 3
    refuse turns of several calls."""
    split: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and len(calls) > 1:
            turn = {"role": message.get("role"), "content": NoText()}
            turns = [message, *[turn] * (len(calls) - 1)]
            split += [
                turn | {"tool_calls": [call]} for turn, call in zip(turns, calls, strict=True)
            ]
        else:
            split.insert(_place(message, split), message)
    return split


def _place(message: dict[str, Any], before: list[dict[str, Any]]) -> int:
    number = message.get("tool_call_id")
    for i in range(0 if number is None else len(before), 0, -1):
        each = before[i - 1]
        calls = each.get("tool_calls") or ()
        ids = [call.get("id") for call in calls if isinstance(call, dict)]
        if number in (*ids, each.get("tool_call_id")):
            return i
    return len(before)


class WrittenArguments(str):
    """The arguments of a call as a model wrote them, perhaps cut off: a text that `tojson` leaves
    unchanged, and an object whose only key is `arguments`."""

    KEY = "arguments"

    def keys(self) -> Iterator[str]:
        return iter((self.KEY,))

    __iter__ = keys

    def items(self) -> Iterator[tuple[str, str]]:
        return iter(((self.KEY, str(self)),))

    def __getitem__(self, key: Any) -> str:
        return str(self) if key == self.KEY else super().__getitem__(key)


Mapping.register(WrittenArguments)  # for jinja's `is mapping` and `items`


class NoText(str):
    """The content of a turn that has calls or reasoning alone: an empty text that is none. Without
    it, templates of Qwen3 and DeepSeek fail."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is None or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `x` as JSON without jinja's escapes for HTML; `WrittenArguments` unchanged."""
    written: dict[str, str] = {}
    text = json.dumps(
        _with_stand_ins(x, written),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    for stand_in, arguments in written.items():
        text = text.replace(f'"{stand_in}"', arguments)
    return text


def _with_stand_ins(value: Any, written: dict[str, str]) -> Any:
    if isinstance(value, WrittenArguments):
        written[stand_in := secrets.token_hex(16)] = value
        return stand_in
    if isinstance(value, dict):
        return {key: _with_stand_ins(item, written) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(item, written) for item in value]
    return value


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training."""

    tags = {"generation"}  # noqa: RUF012 - the name is jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global `dict` of templates, without the other attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja's `namespace`, without attributes whose names begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # An attribute may have the name `self`.
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}: it begins with an underscore")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.tests["none"] = lambda value: value is None or isinstance(value, NoText)
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


_ENVIRONMENT = _environment()
