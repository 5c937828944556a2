"""Chat templates, rendered as transformers renders them, and the messages that they take."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, ModelInfo
from pass_runtime.errors import PassError
from pass_runtime.text.child import ChildPool, ChildStopped, Limits

Role = Literal["system", "developer", "user", "assistant"]


def template_role(role: Role) -> str:
    """The role that chat templates use: a developer's message is a system message."""
    return "system" if role == "developer" else role


class TextMessage(BaseModel):
    """A message of `pass-run batch`, or of a saved chat: {"role", "content"}, and no other
    fields."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    content: str

    def plain(self) -> dict[str, str]:
        """The message in the form that chat templates take."""
        return {"role": template_role(self.role), "content": self.content}


Message = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, and other fields that the
template reads. A called function may have `written_arguments`, a text, in place of `arguments`:
templates write it as it is."""
RENDER_LIMITS = Limits(cpu_seconds=5.0, memory_bytes=512 << 20)
"""Limits of rendering one prompt. Usual chat templates take milliseconds and few MiB."""
MAX_CHILDREN = 2
"""The most prompts rendered at a time: as many as the server has threads that read prompts."""


class ChatTemplate:
    """The chat templates of a model, which render in child processes. The first call starts one.
    Any thread may call its methods."""

    def __init__(
        self, sources: str | Mapping[str, str], tokens: Mapping[str, str] | None = None
    ) -> None:
        """sources: the template, or templates by their names in `CHAT_TEMPLATE_FILES`. tokens: the
        tokenizer's special tokens by the variable that holds them, such as `bos_token`."""
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.tokens = dict(tokens or {})
        by_file = {CHAT_TEMPLATE_FILES[name]: source for name, source in self.sources.items()}
        setup = {"sources": by_file, "tokens": self.tokens}
        self._pool = ChildPool(
            "pass_runtime.text.rendering:Renderer", setup, RENDER_LIMITS, size=MAX_CHILDREN
        )

    def reads(self, variable: str) -> bool:
        """Whether the source of a template contains this variable's name."""
        return any(
            re.search(rf"\b{re.escape(variable)}\b", source) for source in self.sources.values()
        )

    @property
    def tool_use_source(self) -> str:
        """The source of the template for conversations with tools."""
        return self.sources[self._name(tools=True)]

    def check(self) -> None:
        """Compile the templates. Raises PassError if one does not compile."""
        for name in self.sources:
            self._call({"template": CHAT_TEMPLATE_FILES[name], "messages": None})

    def render(self, messages: Sequence[Message], **variables: Any) -> str:
        """The prompt for the assistant's next turn. Raises PassError if the template fails."""
        return self.render_at(time.time(), messages, variables)

    def render_at(
        self, now: float, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """`render` at the time `now`, in seconds since 1970."""
        if not messages:
            raise PassError("a conversation needs at least one message")
        file = CHAT_TEMPLATE_FILES[self._name(tools=variables.get("tools") is not None)]
        try:
            call = {
                "template": file,
                "time": now,
                "messages": _plain(messages),
                "variables": _plain(variables),
            }
        except (TypeError, RecursionError) as error:
            raise PassError(
                f"the chat template cannot read these messages and variables: {error}"
            ) from None
        return self._call(call)

    def close(self) -> None:
        """End the child processes. The next call starts a new one."""
        self._pool.close()

    def _name(self, *, tools: bool) -> str:
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise PassError(
                "the model's only chat template is for conversations with tools; pass tools"
            )
        return name

    def _call(self, call: Mapping[str, Any]) -> str:
        try:
            return str(self._pool.call(call))
        except ChildStopped as error:
            raise PassError(f"the chat template cannot be used: {error}") from None


def _plain(value: Any) -> Any:
    """`value` as dicts, lists and plain values. Raises TypeError if JSON cannot hold it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"they must be JSON values, not {type(value).__name__}")


def load_chat_template(bundle: Path, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The bundle's templates, or None if the model has none."""
    paths = {name: bundle / file for name, file in CHAT_TEMPLATE_FILES.items()}
    sources = {name: _read(path) for name, path in paths.items() if path.is_file()}
    return ChatTemplate(sources, tokens) if sources else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text; export the bundle again") from None


def template_tokens(model: ModelInfo, tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens that templates read, by variable. Bundles of older versions list none; for
    these, `bos_token` and `eos_token` follow from the model's token ids."""
    if model.special_tokens is not None:
        return model.special_tokens
    ids = {"bos_token": model.bos_token_id, "eos_token": next(iter(model.eos_token_ids), None)}
    found = {
        name: tokenizer.id_to_token(number) for name, number in ids.items() if number is not None
    }
    return {name: text for name, text in found.items() if text is not None}
