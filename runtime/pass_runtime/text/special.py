"""Conversations as token ids, in which special tokens come from the chat template and never from a message.

A template's result is a single string: `<|im_end|>` in it ends a turn, whether the template wrote it or a message holds
it. So messages that may spell special tokens are rendered a second time, with marks around those places. A special
token without marks in that result is the template's. Where there are no others, the ids are those that Hugging Face
gives the conversation; where there are, all but the template's special tokens is encoded as plain text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from pass_runtime.errors import PassError
from pass_runtime.text.encoding import encode

PRIVATE = 0xE000
"""The first of the 6400 characters of Unicode's private use area, which marks are made of."""


@dataclass(frozen=True)
class _Plain:
    """tokenizer: encodes the text of special tokens as plain text. stand_ins: by special token id, a secret text that
    it encodes as one token in place of the special one. ids: the special token id by the id of its stand-in. unknown:
    the id for characters that have no token."""

    tokenizer: Tokenizer
    stand_ins: Mapping[int, str]
    ids: Mapping[int, int]
    unknown: int | None


class ChatEncoder:
    """Encodes conversations. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token for number, token in added.items() if token.special}
        contents = [token.content for token in self._special.values()]
        self._beginnings = {content[:end] for content in contents for end in range(1, len(content))}
        self._endings = {content[start:] for content in contents for start in range(1, len(content))}
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens([AddedToken(content, normalized=False) for content in contents])
        self._found = {self._finder.token_to_id(token.content): number for number, token in self._special.items()}
        self._lock = Lock()

    def encode(self, messages: Sequence[Any], render: Callable[[Any], str]) -> list[int]:
        """The ids of a conversation. messages: all that comes from outside; render: makes the prompt of it. PassError
        where a message holds the text of a special token that cannot be encoded as plain text."""
        text = render(messages)
        strings, mark = list(_strings(messages)), _unguessable(4)
        marked = self._marked(strings, mark)
        if marked != strings:
            left = iter(marked)
            parts = self._parts(render(_mapped(messages, lambda _: next(left))), mark)
            if parts != self._parts(text, mark):
                return self._encode_parts(parts)
        return encode(self._tokenizer, text)

    def _marked(self, strings: Sequence[str], mark: str) -> list[str]:
        """The strings with a mark on both sides of every special token, and at an end that may form one with what the
        template puts next to it. (Roles and names of fields have no marks at their ends: templates compare them.)"""
        between = _unguessable(4)
        joined = between.join(strings).encode(errors="replace").decode()  # the finder refuses lone surrogates
        spans = self._spans(joined)
        if spans:
            parts, end = [], 0
            for start, stop, _ in spans:
                parts += [joined[end:start], mark, joined[start:stop], mark]
                end = stop
            strings = "".join([*parts, joined[end:]]).split(between)
        return [text if text.isidentifier() else self._with_marked_ends(text, mark) for text in strings]

    def _with_marked_ends(self, text: str, mark: str) -> str:
        longest = range(1, 1 + min(len(text), max(map(len, self._beginnings), default=0)))
        before = mark if any(text[:size] in self._endings for size in longest) else ""
        return before + text + (mark if any(text[-size:] in self._beginnings for size in longest) else "")

    def _parts(self, text: str, mark: str) -> list[str | int]:
        """Text, without marks, and ids of the template's special tokens, in turn."""
        parts: list[str | int] = []
        end = 0
        for start, stop, number in self._spans(text):
            if not (text.endswith(mark, 0, start) and text.startswith(mark, stop)):
                parts += [text[end:start].replace(mark, ""), number]
                end = stop
        return [*parts, text[end:].replace(mark, "")]

    def _encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        with self._lock:
            plain = self._plain
        text = "".join(part if isinstance(part, str) else plain.stand_ins[part] for part in parts)
        ids = encode(plain.tokenizer, text)
        for token in ids:
            if token in self._special and token != plain.unknown:
                spelled = self._special[token].content
                raise PassError(
                    f"a message holds the text of the special token {spelled}, which the tokenizer cannot read as "
                    "plain text; leave it out"
                )
        return [plain.ids.get(token, token) for token in ids]

    @cached_property
    def _plain(self) -> _Plain:
        """Made at first use, since it takes as much memory as the tokenizer."""
        written = self._tokenizer.to_str()
        model = json.loads(written)["model"]
        tokenizer = Tokenizer.from_str(written)
        tokenizer.encode_special_tokens = True
        secret = _unguessable(8)
        stand_ins = {
            number: secret + chr(PRIVATE + place // 1024) + chr(PRIVATE + place % 1024)
            for place, number in enumerate(self._special)
        }
        tokenizer.add_tokens(
            [
                AddedToken(stand_ins[number], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)
                for number, token in self._special.items()
            ]
        )
        ids = {tokenizer.token_to_id(text) or 0: number for number, text in stand_ins.items()}
        unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
        return _Plain(tokenizer, stand_ins, ids, unknown)

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        """Where special tokens are spelled: (start, end, id) of each."""
        found = self._finder.encode(text)
        return [(*span, self._found[token]) for span, token in zip(found.offsets, found.ids, strict=True) if token]


def _unguessable(length: int) -> str:
    return "".join(chr(PRIVATE + secrets.randbelow(6400)) for _ in range(length))


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`, names of fields too, in the order of `_mapped`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value
