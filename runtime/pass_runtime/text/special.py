"""Encodes conversations in which messages may spell special tokens, as token ids. Special tokens
come from the chat template and never from a message.

A template writes a single string, in which `<|im_end|>` ends a turn, whether it comes from the
template or from a message. So these conversations are rendered a second time, with the places
changed that may spell special tokens. Only the first text is encoded, because templates may slice,
measure and compare messages, and so write something else for changed ones. The second text shows
which parts of the first come from messages:

1. The letters of the places are exchanged for others of their kind, so that lengths, cases and
   spaces stay. A special token that has the same letters in both texts comes from the template.
2. A template that looks for a special token's text in messages does not find it in exchanged ones.
   So, if the texts differ elsewhere, too, the places get marks around them instead. A special token
   without marks is the template's.
3. If these texts differ in more than the marks, messages that spell a special token are refused.

If all special tokens come from the template, the ids are those of Hugging Face's tokenizer.
Otherwise everything except the template's special tokens is encoded as plain text.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.chat_template import (
    PRIVATE_USE_START,
    Places,
    Span,
    SpecialTokens,
    strings_in,
    unguessable,
)
from pass_runtime.text.detokenizer import encode


@dataclass(frozen=True)
class _PlainTextTokenizer:
    """A tokenizer that encodes the texts of special tokens as plain text.

    The template's own special tokens are put into the text as stand-ins: secret texts that this
    tokenizer encodes as one token each. stand_ins: the stand-in of each special token id. ids: the
    special token id, by the id of the stand-in's token. unknown: the id for characters that have no
    token.
    """

    tokenizer: Tokenizer
    stand_ins: Mapping[int, str]
    ids: Mapping[int, int]
    unknown: int | None


class ChatEncoder:
    """Encodes conversations. Any thread may call `encode`."""

    def __init__(self, tokenizer: Tokenizer, special: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._lock = Lock()

    def encode(self, messages: Any, text: str, render: Callable[[Any], str]) -> list[int]:
        """Return the ids of a conversation. messages: all input that is not trusted. text: the
        prompt that `render` makes of it. Raises PassError if a message holds the text of a special
        token that cannot be encoded as plain text, or that cannot be distinguished from the
        template's."""
        strings = list(strings_in(messages))
        spans = self._special.spans(text)
        places = [self._without_absent(each, spans) for each in self._special.places(strings)]
        if any(places) and spans:
            of_template = self._of_template(text, messages, strings, places, render)
            if of_template != spans:
                return self._encode_parts(_parts(text, of_template))
        return encode(self._tokenizer, text)

    def _of_template(
        self,
        text: str,
        messages: Any,
        strings: Sequence[str],
        places: Sequence[Places],
        render: Callable[[Any], str],
    ) -> list[Span]:
        """Return the special tokens in `text` that the template wrote. text: the prompt. strings,
        places: the strings in the messages, and the places in each."""
        for variant in (_ExchangedCharacters(), _MarkedPlaces()):
            changed = _replaced(messages, map(variant.change, strings, places))
            try:
                other = render(changed)
            except PassError:  # The template refuses the changed messages.
                continue
            of_template = variant.kept(text, other, self._special.spans(other))
            if of_template is not None:
                return of_template
        spelled = next(
            (
                self._special.tokens[number].content
                for each in places
                for _, _, number in each.whole
            ),
            None,
        )
        if spelled is not None:
            raise PassError(
                f"a message holds the text of the special token {spelled}, and the chat template "
                "reads the message in a way that hides its place in the prompt; leave that text "
                "out"
            )
        return self._special.spans(text)

    def _without_absent(self, places: Places, spans: Sequence[Span]) -> Places:
        """Return `places` without the special tokens of which the prompt, whose special tokens are
        `spans`, has no part: they need no change, and a template that looks for them in messages
        still finds them."""
        present = {self._special.tokens[number].content for _, _, number in spans}
        spelled = ((span, self._special.tokens[span[2]].content) for span in places.whole)
        kept = [span for span, text in spelled if any(each in text for each in present)]
        return replace(places, whole=kept)

    def _encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of `parts`: plain text, and ids of the template's special tokens."""
        with self._lock:
            plain = self._plain
        text = "".join(part if isinstance(part, str) else plain.stand_ins[part] for part in parts)
        ids = encode(plain.tokenizer, text)
        for token in ids:
            if token in self._special.tokens and token != plain.unknown:
                spelled = self._special.tokens[token].content
                raise PassError(
                    f"a message holds the text of the special token {spelled}, which the tokenizer "
                    "cannot encode as plain text; leave that text out"
                )
        return [plain.ids.get(token, token) for token in ids]

    @cached_property
    def _plain(self) -> _PlainTextTokenizer:
        """The tokenizer for plain text, made on first use, because it takes much memory."""
        tokenizer_json = self._tokenizer.to_str()
        model = json.loads(tokenizer_json)["model"]
        tokenizer = Tokenizer.from_str(tokenizer_json)
        tokenizer.encode_special_tokens = True
        secret = unguessable(8)
        stand_ins = {
            number: secret
            + chr(PRIVATE_USE_START + i // 1024)  # two characters, which differ for each token
            + chr(PRIVATE_USE_START + i % 1024)
            for i, number in enumerate(self._special.tokens)
        }
        tokenizer.add_tokens(
            [
                AddedToken(
                    stand_ins[number], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                for number, token in self._special.tokens.items()
            ]
        )
        ids = {tokenizer.token_to_id(text) or 0: number for number, text in stand_ins.items()}
        # Unigram models name the unknown token by its id, other models by its text.
        unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
        return _PlainTextTokenizer(tokenizer, stand_ins, ids, unknown)


class _ExchangedCharacters:
    """A way to change places: their characters become others of the same kind."""

    def __init__(self) -> None:
        self._others = _OtherCharacters()

    def change(self, text: str, places: Places) -> str:
        """Return `text`, a string of a message, with its places changed."""
        written = list(text)
        for start, end, _ in places.whole:
            letters = [i for i in range(start, end) if text[i].isascii() and text[i].isalnum()]
            for i in letters or range(start, end):
                written[i] = text[i].translate(self._others)
        for i in [0] * places.before + [len(text) - 1] * places.after:  # so it completes no token
            written[i] = text[i].translate(self._others)
        return "".join(written)

    def kept(self, text: str, other: str, spans: Sequence[Span]) -> list[Span] | None:
        """Return the special tokens in `other`, the prompt of changed messages, that are the same
        in `text`, the prompt; None if the two differ in more than exchanged characters."""
        if len(text) != len(other):
            return None
        exchanged = text.translate(self._others)
        if any(b not in (a, c) for a, b, c in zip(text, other, exchanged, strict=True)):
            return None
        return [span for span in spans if text[span[0] : span[1]] == other[span[0] : span[1]]]


class _OtherCharacters(dict[int, int]):
    """A table for `str.translate`: for each character, a random other one of the same kind."""

    def __init__(self) -> None:
        for characters in (string.ascii_lowercase, string.ascii_uppercase, string.digits, "<>"):
            shift = 1 + secrets.randbelow(len(characters) - 1)
            self |= str.maketrans(characters, characters[shift:] + characters[:shift])
        self._other = ord(unguessable(1))

    def __missing__(self, _: int) -> int:
        return self._other


class _MarkedPlaces:
    """A way to change places: they get marks before and after them."""

    def __init__(self) -> None:
        self._begin, self._end = unguessable(4), unguessable(4)

    def change(self, text: str, places: Places) -> str:
        """Return `text`, a string of a message, with marks. Its start gets `_begin` and its end
        `_end`, so that a special token that the template writes between two strings does not stand
        between `_begin` and `_end`."""
        parts, done = [self._begin] if places.before else [], 0
        for start, end, _ in places.whole:
            parts += [text[done:start], self._begin, text[start:end], self._end]
            done = end
        return "".join([*parts, text[done:], self._end if places.after else ""])

    def kept(self, text: str, other: str, spans: Sequence[Span]) -> list[Span] | None:
        """Return the special tokens without marks in `other`, the prompt of changed messages, with
        their places in `text`, the prompt; None if the two differ in more than marks."""
        of_template, place, done = [], 0, 0
        for start, end, number in spans:
            place += len(self._without(other[done:start]))
            if not (other.endswith(self._begin, 0, start) and other.startswith(self._end, end)):
                of_template.append((place, place + end - start, number))
            place, done = place + end - start, end
        return of_template if self._without(other) == text else None

    def _without(self, text: str) -> str:
        return text.replace(self._begin, "").replace(self._end, "")


def _parts(text: str, spans: Sequence[Span]) -> list[str | int]:
    """Split `text` at its special tokens, `spans`, into text and the tokens' ids, in turn."""
    parts: list[str | int] = []
    done = 0
    for start, end, number in spans:
        parts += [text[done:start], number]
        done = end
    return [*parts, text[done:]]


def _replaced(value: Any, strings: Iterator[str]) -> Any:
    """Return `value` with `strings` in place of those that `strings_in` yields."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, Mapping):
        return {_replaced(key, strings): _replaced(item, strings) for key, item in value.items()}
    return (
        [_replaced(item, strings) for item in value] if isinstance(value, list | tuple) else value
    )
