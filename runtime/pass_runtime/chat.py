"""Chat templates, rendered the way Hugging Face renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pass_runtime.errors import PassError

FILE_NAME = "chat_template.jinja"
Message = Mapping[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


class ChatTemplate:
    """A sandboxed template over `messages`, `add_generation_prompt`, `bos_token` and `eos_token`."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise PassError(f"{FILE_NAME}: {error}") from None

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt that asks for the assistant's next turn."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._tokens, **variables)
        except TemplateError as error:
            raise PassError(f"the chat template refuses these messages: {error}") from None


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def load_chat_template(bundle: Path, bos_token: str, eos_token: str) -> ChatTemplate | None:
    """The bundle's template, or None where the model has none."""
    path = bundle / FILE_NAME
    if not path.is_file():
        return None
    return ChatTemplate(path.read_text(encoding="utf-8"), bos_token, eos_token)
