"""What runs in the child process that renders chat templates: jinja, with all that transformers
adds to it for them.

The environment, the variables and the form of messages are those of transformers'
`apply_chat_template`. jinja's sandbox keeps Python out of a template's reach; the child
process has limits on time and memory (`pass_runtime.text.child`).
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
"""The most bytes of UTF-8 that a template may write: more than any model reads."""
WRITTEN_ARGUMENTS = "written_arguments"
"""The field of a tool call that the parent sends in place of `arguments` if a model wrote them, as
they may be no valid JSON. Templates get it as `WrittenArguments`."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""A message's reasoning is in one of these fields. Templates get it in the first two."""


class Renderer:
    """The chat templates of a model.

    setup: `sources`, the text of a template by its file; `tokens`, a special token by its variable.
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
        environment.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda form: datetime.fromtimestamp(self._time).strftime(form),
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._environment = environment
        self._compiled = cache(self._compile)

    def __call__(self, call: Mapping[str, Any]) -> str:
        """call: `template`, a file; `time`, the template's current time in seconds since 1970;
        `messages` and `variables`. If `messages` is None, the template is only compiled. Raises
        PassError if the template does not compile, refuses the messages, or writes too much."""
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
            "messages": [_message(each, self._written) for each in call["messages"]],
        }
        try:
            text = template.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise PassError(
                f"the chat template refuses these messages: {_one_line(error)}"
            ) from None
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
        """JSON without jinja's escapes for HTML. `WrittenArguments` are not changed."""
        found: dict[str, WrittenArguments] = {}
        if self._written:
            x = _without_written(x, found)
        text = json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        for stand_in, arguments in found.items():
            text = text.replace(f'"{stand_in}"', arguments)
        return text

    def _compile(self, file: str) -> Template:
        try:
            return self._environment.from_string(self._sources[file])
        except MemoryError:
            raise
        except Exception as error:  # the Python code that jinja generates may fail to compile, too
            raise PassError(f"{file}: {_one_line(error)}") from None


class WrittenArguments(str):
    """The arguments of a call as a model wrote them: a text that need not be JSON, because it may
    have been cut off. Templates may take it for a text, which `tojson` writes unchanged, or for an
    object with the one key `arguments`, whose value is the text."""

    KEY = "arguments"

    def keys(self) -> Iterator[str]:
        return iter((self.KEY,))

    __iter__ = keys

    def items(self) -> Iterator[tuple[str, str]]:
        return iter(((self.KEY, str(self)),))

    def __getitem__(self, key: Any) -> str:
        return str(self) if key == self.KEY else super().__getitem__(key)


Mapping.register(WrittenArguments)  # for jinja's `is mapping` and `items`


def _message(message: Any, written: list[WrittenArguments]) -> Any:
    """A message as transformers hands it to a template: without fields that are None, and with the
    reasoning under the names that templates read. Its `WrittenArguments` are added to `written`."""
    if not isinstance(message, dict):
        raise PassError(
            f"a message must be an object with a role and content, not {str(message)[:40]!r}"
        )
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in REASONING_FIELDS if name in found), None)
    if isinstance(found.get("tool_calls"), list):
        found["tool_calls"] = [_call(call, written) for call in found["tool_calls"]]
    if reasoning is None:
        return found
    return {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _call(call: Any, written: list[WrittenArguments]) -> Any:
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


def _without_written(value: Any, found: dict[str, WrittenArguments]) -> Any:
    """`value` with stand-ins for `WrittenArguments`, which are added to `found`."""
    if isinstance(value, WrittenArguments):
        found[stand_in := secrets.token_hex(16)] = value
        return stand_in
    if isinstance(value, dict):
        return {key: _without_written(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_written(item, found) for item in value]
    return value


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training: its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name is jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """jinja's `namespace`, without attributes whose names begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute's name
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
