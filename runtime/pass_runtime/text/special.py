"""Encodes chats so that special tokens come from the chat template, and never from a message.

A template writes one string, in which `<|im_end|>` ends a turn whoever wrote it. So the letters of
special tokens that messages spell, or might spell together with their neighbours, are exchanged for
private-use characters before the template is rendered, and exchanged back afterwards. A template
that looks for a special token in a message does not find it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from pass_runtime.errors import PassError
from pass_runtime.text.detokenizer import encode

PRIVATE_USE = range(0xE000, 0xF900)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PRIVATE_OR_ESCAPED = re.compile(r"[\ue000-\uf8ff]|\\u[0-9a-f]{4}")


class ChatEncoder:
    """Encodes chats for one tokenizer. Any thread may call `encode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token for number, token in added.items() if token.special}
        texts = dict.fromkeys(token.content for token in self._special.values())
        self._beginnings, self._endings = set[str](), set[str]()
        for text, size in [(each, size) for each in texts for size in range(1, len(each))]:
            beginning, ending = text[:size], text[size:]
            # A neighbour that has all letters of a token, and is none itself, spells it on purpose.
            if _letters(beginning) or not _letters(text) or ending in texts:
                self._beginnings.add(beginning)
            if _letters(ending) or not _letters(text) or beginning in texts:
                self._endings.add(ending)
        self._max_size = max(map(len, texts), default=0)
        self._characters = sorted(set("".join(texts)))
        # All text but special tokens becomes the finder's token 0.
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens([AddedToken(text, normalized=False) for text in texts])
        self._by_finder_id = {
            self._finder.token_to_id(token.content): number
            for number, token in self._special.items()
        }
        self._lock = Lock()

    def encode(self, messages: Any, render: Callable[[Any], str]) -> list[int]:
        """Return the ids of the prompt that `render` makes of `messages`, nested lists and mappings
        of text. Raises PassError if a special token cannot be encoded as plain text."""
        try:
            strings = list(strings_in(messages))
        except RecursionError:
            raise PassError("the messages are nested too deeply; send flatter ones") from None
        if not any(map(self._places, strings)):
            return encode(self._tokenizer, render(messages))
        private = self._private_characters("".join([*strings, *self._characters]))
        parts = self._parts(render(_mapped(messages, lambda text: self._hidden(text, private))))
        own = {hidden: character for character, hidden in private.items()}
        own |= {_escaped(hidden): _escaped(character) for hidden, character in own.items()}
        parts = [
            _PRIVATE_OR_ESCAPED.sub(lambda match: own.get(match[0], match[0]), part)
            if isinstance(part, str)
            else part
            for part in parts
        ]
        text = "".join(
            part if isinstance(part, str) else self._special[part].content for part in parts
        )
        # If all special tokens are the template's, the ids are those of Hugging Face.
        return encode(self._tokenizer, text) if self._parts(text) == parts else self._ids(parts)

    def _spans(self, text: str) -> list[tuple[int, int, int]]:
        encoding = self._finder.encode(_SURROGATE.sub("\ufffd", text))
        return [
            (*span, self._by_finder_id[token])
            for span, token in zip(encoding.offsets, encoding.ids, strict=True)
            if token
        ]

    def _places(self, text: str) -> set[int]:
        """Return the indices of the letters of special tokens, or of parts of them at the ends of
        `text`, which its neighbours may complete."""
        spans = [(start, end) for start, end, _ in self._spans(text)]
        if not text.isidentifier():  # Templates make tokens of roles.
            for size in range(1, 1 + min(len(text), self._max_size)):
                if text[:size] in self._endings:
                    spans.append((0, size))
                if text[-size:] in self._beginnings:
                    spans.append((len(text) - size, len(text)))
        places = set[int]()
        for start, end in spans:
            letters = [start + i for i in _letters(text[start:end])]
            places.update(letters or range(start, end))
        return places

    def _private_characters(self, text: str) -> dict[str, str]:
        free = (
            character
            for character in map(chr, PRIVATE_USE)
            if character not in text and _escaped(character) not in text
        )
        private = dict(zip(self._characters, free, strict=False))
        if len(private) < len(self._characters):
            raise PassError("the messages have too many private-use characters; leave them out")
        return private

    def _hidden(self, text: str, private: Mapping[str, str]) -> str:
        while places := self._places(text):  # Tokens may overlap.
            text = "".join(private[c] if i in places else c for i, c in enumerate(text))
        return text

    def _parts(self, text: str) -> list[str | int]:
        parts: list[str | int] = []
        done = 0
        for start, end, number in self._spans(text):
            parts += [text[done:start], number]
            done = end
        return [*parts, text[done:]]

    def _ids(self, parts: Sequence[str | int]) -> list[int]:
        with self._lock:
            tokenizer, stand_ins, unknown = self._plain
        text = "".join(part if isinstance(part, str) else stand_ins[part] for part in parts)
        ids = encode(tokenizer, text)
        for token in ids:
            if token in self._special and token != unknown:
                raise PassError(
                    f"a message holds the text of the special token {self._special[token].content},"
                    " which the tokenizer cannot encode as plain text; leave that text out"
                )
        own = {tokenizer.token_to_id(text): number for number, text in stand_ins.items()}
        return [own.get(token, token) for token in ids]

    @cached_property
    def _plain(self) -> tuple[Tokenizer, Mapping[int, str], int | None]:
        """A tokenizer that encodes special tokens as plain text, and a secret stand-in of each as
        one token; the stand-ins; and the id for characters that have no token. It is made on first
        use, because it takes much memory."""
        tokenizer_json = self._tokenizer.to_str()
        model = json.loads(tokenizer_json)["model"]
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.encode_special_tokens = True
        secret = "".join(chr(secrets.choice(PRIVATE_USE)) for _ in range(8))
        stand_ins = {
            number: secret + chr(PRIVATE_USE[i // 1024]) + chr(PRIVATE_USE[i % 1024])
            for i, number in enumerate(self._special)
        }
        tokenizer.add_tokens(
            [
                AddedToken(
                    stand_ins[number], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                for number, token in self._special.items()
            ]
        )
        # Unigram models name the unknown token by its id, other models by its text.
        unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
        return tokenizer, stand_ins, unknown


def _letters(text: str) -> list[int]:
    return [i for i, character in enumerate(text) if character.isalnum()]


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


def _escaped(character: str) -> str:
    return json.dumps(character)[1:-1]
