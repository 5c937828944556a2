"""Renders chat templates with jinja, in a child process that `pass_runtime.text.chat_template`
starts.

The environment, the variables and the form of messages are those of transformers'
`apply_chat_template`, but for turns without content (`NoText`). jinja's sandbox keeps Python out of
a template's reach, and the child process has limits of time and memory (`pass_runtime.text.child`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pass_runtime.errors import PassError

MAX_BYTES = 1 << 25
"""The most bytes of UTF-8 that a template may write; no model reads as many."""
WRITTEN_ARGUMENTS = "written_arguments"
"""The field of a tool call that the parent process sends in place of `arguments` if a model wrote
them, because they need not be valid JSON. Templates get them as `WrittenArguments`."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""The fields in which a message may have its reasoning. Templates get it in the first two."""


class Renderer:
    """Renders the chat templates of a model.

    setup: `sources`, the templates by their files' names; `tokens`, the special tokens by the
    variables in which templates read them.
    """

    def __init__(self, setup: Mapping[str, Mapping[str, str]]) -> None:
        self._sources, self._tokens = setup["sources"], setup["tokens"]
        self._time = 0.0
        self._written: list[WrittenArguments] = []
        """The arguments in the messages that are being rendered."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = self._tojson
        environment.tests["none"] = lambda value: value is None or isinstance(value, NoText)
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.fromtimestamp(self._time).strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._environment = environment
        self._compiled = cache(self._compile)

    def __call__(self, call: Mapping[str, Any]) -> str:
        """Return the prompt that a template writes; "" if it is only compiled. Raises PassError if
        the template does not compile, refuses the messages, or writes too much.

        call: `template`, the name of its file; `time`, what the template takes for the current
        time, in seconds since 1970; `messages`, or None to compile only; and `variables`."""
        template = self._compiled(call["template"])
        if call["messages"] is None:
            return ""
        self._time, self._written = call["time"], []
        variables = {
            **self._tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **call["variables"],
        }
        messages = [_message(each, self._written) for each in call["messages"]]
        try:
            text = _rendered(template, variables, messages)
        except PassError:
            if (split := _with_single_calls(messages)) == messages:
                raise
            text = _rendered(template, variables, split)
        if len(text.encode(errors="replace")) > MAX_BYTES:
            raise PassError(
                f"the chat template cannot be used: it writes more than {MAX_BYTES >> 20} MiB"
            )
        return text

    def _tojson(
        self,
        x: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Return `x` as JSON without jinja's escapes for HTML; `WrittenArguments` unchanged."""
        replaced: dict[str, WrittenArguments] = {}
        if self._written:
            x = _with_stand_ins(x, replaced)
        text = json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        for stand_in, arguments in replaced.items():
            text = text.replace(f'"{stand_in}"', arguments)
        return text

    def _compile(self, file: str) -> Template:
        try:
            return self._environment.from_string(self._sources[file])
        except MemoryError:
            raise
        except Exception as error:  # The Python code that jinja generates may fail to compile, too.
            raise PassError(f"{file}: {_one_line(error)}") from None


def _rendered(
    template: Template, variables: Mapping[str, Any], messages: list[dict[str, Any]]
) -> str:
    try:
        return template.render({**variables, "messages": messages})
    except MemoryError:
        raise
    except Exception as error:  # A template is a program, and may raise anything.
        raise PassError(f"the chat template refuses these messages: {_one_line(error)}") from None


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with one call in each, and its results after it. The templates of Llama 3
    refuse turns of several calls, which its models write all the same."""
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
    """Return the index of a message among those before it: a result follows its call, and the other
    results of this call."""
    number = message.get("tool_call_id")
    for i in range(0 if number is None else len(before), 0, -1):
        each = before[i - 1]
        calls = each.get("tool_calls") or ()
        ids = [call.get("id") for call in calls if isinstance(call, dict)]
        if number in (*ids, each.get("tool_call_id")):
            return i
    return len(before)


class WrittenArguments(str):
    """The arguments of a tool call as a model wrote them: a text that need not be JSON, because it
    may have been cut off. Templates may use it as a text, which `tojson` writes unchanged, or as an
    object with the only key `arguments`, whose value is the text."""

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
    """The content of a turn that has calls or reasoning alone. Templates that join content to other
    text get an empty text, and those that ask whether it is none get the answer yes. (transformers
    leaves such content out, for which published templates of Qwen3 and DeepSeek fail.)"""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return other is None or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other


def _message(message: Any, written: list[WrittenArguments]) -> dict[str, Any]:
    """Return a message as transformers passes it to a template: without fields that are None, and
    with the reasoning in two fields. The model's content is `NoText` if it has none. The
    `WrittenArguments` are added to `written`."""
    if not isinstance(message, dict):
        raise PassError(
            f"a message must be an object with a role and content, not {str(message)[:40]!r}"
        )
    fields = {name: value for name, value in message.items() if value is not None}
    if fields.get("role") == "assistant" and "content" not in fields:
        fields = {"role": "assistant", "content": NoText(), **fields}
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    if isinstance(fields.get("tool_calls"), list):
        fields["tool_calls"] = [_tool_call(call, written) for call in fields["tool_calls"]]
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _tool_call(call: Any, written: list[WrittenArguments]) -> Any:
    """Return a message's tool call, its arguments as `WrittenArguments` if a model wrote them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or WRITTEN_ARGUMENTS not in function:
        return call
    written.append(WrittenArguments(function[WRITTEN_ARGUMENTS]))
    others = {name: value for name, value in function.items() if name != WRITTEN_ARGUMENTS}
    return {**call, "function": {**others, "arguments": written[-1]}}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000] or type(error).__name__


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _with_stand_ins(value: Any, replaced: dict[str, WrittenArguments]) -> Any:
    """Return `value` with random texts for `WrittenArguments`; `replaced` gets these by text."""
    if isinstance(value, WrittenArguments):
        replaced[stand_in := secrets.token_hex(16)] = value
        return stand_in
    if isinstance(value, dict):
        return {key: _with_stand_ins(item, replaced) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_stand_ins(item, replaced) for item in value]
    return value


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training. Only its content is rendered."""

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
