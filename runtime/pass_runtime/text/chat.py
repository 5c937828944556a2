"""Chat templates, rendered the way Hugging Face renders them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILE
from pass_runtime.errors import PassError
from pass_runtime.text.sandbox import BoundedEnvironment, TemplateLimitError, bounded, budget

Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, and more where the template reads more."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training: it is rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 - the name is jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
    """Hugging Face's `tojson`: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=False, **options)


class ChatTemplate:
    """A sandboxed template over `messages`, `add_generation_prompt`, `bos_token` and `eos_token`."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = bounded(_tojson)
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            with budget():
                self._template = environment.from_string(source)
        except Exception as error:  # also those of compiling the Python code that jinja generates
            raise PassError(f"{CHAT_TEMPLATE_FILE}: {_line(error)}") from None

    def names(self, variable: str) -> bool:
        """Whether the template reads a variable of this name, as far as can be seen from its text."""
        return re.search(rf"\b{re.escape(variable)}\b", self.source) is not None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt for the assistant's next turn. PassError where the template refuses or exceeds its limits."""
        if not messages:
            raise PassError("a conversation needs at least one message")
        try:
            with budget():
                return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens, **variables)
        except TemplateLimitError as error:
            raise PassError(f"the chat template cannot be used: {_line(error)}") from None
        except Exception as error:  # a template is a program, and may raise anything
            raise PassError(f"the chat template refuses these messages: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_chat_template(bundle: Path, bos_token: str, eos_token: str) -> ChatTemplate | None:
    """The bundle's template, or None where the model has none."""
    path = bundle / CHAT_TEMPLATE_FILE
    if not path.is_file():
        return None
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text; export the bundle again") from None
    return ChatTemplate(source, bos_token, eos_token)
