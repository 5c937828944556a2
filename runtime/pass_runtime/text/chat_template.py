"""Chat templates, rendered as transformers renders them; the messages that they take, and where the
strings of messages may spell special tokens."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from tokenizers import AddedToken, Tokenizer, models

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, ModelInfo
from pass_runtime.errors import PassError
from pass_runtime.text.child import ChildPool, ChildStopped, Limits

Role = Literal["system", "developer", "user", "assistant"]


def template_role(role: Role) -> str:
    """Return the role that chat templates know: a developer's message is a system message."""
    return "system" if role == "developer" else role


class TextMessage(BaseModel):
    """A message of `pass-run batch`, or of a saved chat: {"role", "content"}, and nothing else."""

    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    content: str

    def plain(self) -> dict[str, str]:
        """Return the message in the form that chat templates take."""
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
        """Return the prompt for the next turn. Raises PassError if the template fails."""
        return self.render_at(time.time(), messages, variables)

    def render_at(
        self, now: float, messages: Sequence[Message], variables: Mapping[str, Any]
    ) -> str:
        """Render as if it were the time `now`, in seconds since 1970."""
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
    """Return a copy of `value` in dicts and lists. Raises TypeError if JSON cannot hold it."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise TypeError(f"they must be JSON values, not {type(value).__name__}")


Span = tuple[int, int, int]
"""A special token in a text: (start, end, id)."""
PRIVATE_USE_START = 0xE000
"""The first character of Unicode's private use area, of which `unguessable` text is made."""
PRIVATE_USE_SIZE = 6400


@dataclass(frozen=True)
class Places:
    """Where a string of a message may become part of a special token.

    whole: the special tokens that the string spells. before, after: whether its first characters
    end a special token's text, or its last characters begin one, so that text of the template next
    to it may complete the token.
    """

    whole: Sequence[Span]
    before: bool
    after: bool

    def __bool__(self) -> bool:
        return bool(self.whole) or self.before or self.after


class SpecialTokens:
    """Finds the texts of a tokenizer's special tokens. Any thread may call its methods."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = {number: token for number, token in added.items() if token.special}
        texts = [token.content for token in self.tokens.values()]
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._endings = {text[start:] for text in texts for start in range(1, len(text))}
        self._max_size = max(map(len, self._beginnings), default=0)
        # The finder has the special tokens; all other text becomes its token 0.
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        self._by_finder_id = {
            self._finder.token_to_id(token.content): number for number, token in self.tokens.items()
        }

    def spans(self, text: str) -> list[Span]:
        """Return the special tokens that `text` spells, in order."""
        encoding = self._finder.encode(text)
        return [
            (*span, self._by_finder_id[token])
            for span, token in zip(encoding.offsets, encoding.ids, strict=True)
            if token
        ]

    def places(self, strings: Sequence[str]) -> list[Places]:
        """Return the places of every string. Identifiers, such as roles and names of fields, get no
        `before` and `after`, because templates compare them."""
        between = unguessable(4)
        # the finder refuses lone surrogates
        joined = between.join(strings).encode(errors="replace").decode()
        spans = iter(self.spans(joined))
        places, start, span = [], 0, next(spans, None)
        for text in strings:
            end, whole = start + len(text), []
            while span is not None and span[0] < end:
                whole.append((span[0] - start, span[1] - start, span[2]))
                span = next(spans, None)
            max_size = 0 if text.isidentifier() else min(len(text), self._max_size)
            sizes = range(1, 1 + max_size)
            before = any(text[:size] in self._endings for size in sizes)
            after = any(text[-size:] in self._beginnings for size in sizes)
            places.append(Places(whole, before, after))
            start = end + len(between)
        return places

    def may_be_in(self, messages: Any) -> bool:
        """Whether a string in `messages` may become part of a special token."""
        return any(self.places(list(strings_in(messages))))


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in nested mappings and lists, also the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def unguessable(length: int) -> str:
    """Return random characters that no message can contain on purpose."""
    return "".join(
        chr(PRIVATE_USE_START + secrets.randbelow(PRIVATE_USE_SIZE)) for _ in range(length)
    )


def load_chat_template(bundle: Path, tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Read the bundle's templates. Return None if the model has none."""
    paths = {name: bundle / file for name, file in CHAT_TEMPLATE_FILES.items()}
    sources = {name: _read(path) for name, path in paths.items() if path.is_file()}
    return ChatTemplate(sources, tokens) if sources else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text; export the bundle again") from None


def template_tokens(model: ModelInfo, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens that templates read, by variable. The manifests of older bundles
    have none; for these, `bos_token` and `eos_token` follow from the model's token ids."""
    if model.special_tokens is not None:
        return model.special_tokens
    ids = {"bos_token": model.bos_token_id, "eos_token": next(iter(model.eos_token_ids), None)}
    texts = {
        name: tokenizer.id_to_token(number) for name, number in ids.items() if number is not None
    }
    return {name: text for name, text in texts.items() if text is not None}
