"""Encodes conversations as token ids. Special tokens come from the chat template and never from a
message.

A template writes a single string, in which `<|im_end|>` ends a turn, whether it comes from the
template or from a message. So messages that may spell special tokens are rendered a second time,
with the places that may do so changed. Only the first text is encoded, because templates may slice,
measure and compare the changed messages, and so write something else. The second text shows which
parts of the first come from messages:

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

from tokenizers import AddedToken, Tokenizer, models

from pass_runtime.errors import PassError
from pass_runtime.text.detokenizer import encode

PRIVATE_USE_START = 0xE000
"""The first character of Unicode's private use area, of which marks are made."""
PRIVATE_USE_SIZE = 6400
Span = tuple[int, int, int]
"""A special token in a text: (start, end, id)."""


@dataclass(frozen=True)
class _PlainTextTokenizer:
    """tokenizer: encodes the text of special tokens as plain text. stand_ins: by special token id,
    a secret text that replaces the template's own special tokens, and that the tokenizer encodes as
    one token. ids: by the id of that token, the special token id. unknown: the id for characters
    that have no token."""

    tokenizer: Tokenizer
    stand_ins: Mapping[int, str]
    ids: Mapping[int, int]
    unknown: int | None


class ChatEncoder:
    """Encodes conversations. Any thread may call `encode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {number: token for number, token in added.items() if token.special}
        contents = [token.content for token in self._special.values()]
        self._beginnings = {content[:end] for content in contents for end in range(1, len(content))}
        self._endings = {content[i:] for content in contents for i in range(1, len(content))}
        self._longest = max(map(len, self._beginnings), default=0)
        # Finds special tokens in a text: all other text becomes the token 0.
        self._finder = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.add_special_tokens(
            [AddedToken(content, normalized=False) for content in contents]
        )
        self._found = {
            self._finder.token_to_id(token.content): number
            for number, token in self._special.items()
        }
        self._lock = Lock()

    def encode(self, messages: Any, render: Callable[[Any], str]) -> list[int]:
        """The ids of a conversation. messages: all input that is not trusted. render: makes the
        prompt from it. Raises PassError if a message holds the text of a special token that cannot
        be encoded as plain text, or that cannot be distinguished from the template's."""
        text = render(messages)
        strings = list(_strings(messages))
        places = self._places(strings)
        if any(places):
            spans = self._spans(text)
            places = [self._without_absent(each, spans) for each in places]
            if any(places) and spans:
                own = self._of_template(text, messages, strings, places, render)
                if own != spans:
                    return self._encode_parts(_parts(text, own))
        return encode(self._tokenizer, text)

    def _of_template(
        self,
        text: str,
        messages: Any,
        strings: Sequence[str],
        places: Sequence[_Places],
        render: Callable[[Any], str],
    ) -> list[Span]:
        """The special tokens in `text` that the template wrote. strings: those of the messages."""
        for variant in (_ExchangedCharacters(), _MarkedPlaces()):
            changed = _replaced(messages, map(variant.change, strings, places))
            try:
                other = render(changed)
            except PassError:  # the template refuses the changed messages
                continue
            found = variant.kept(text, other, self._spans(other))
            if found is not None:
                return found
        spelled = next(
            (self._special[number].content for each in places for _, _, number in each.whole), None
        )
        if spelled is not None:
            raise PassError(
                f"a message holds the text of the special token {spelled}, and the chat template "
                "reads the message in a way that hides its place in the prompt; leave that text "
                "out"
            )
        return self._spans(text)

    def _without_absent(self, places: _Places, spans: Sequence[Span]) -> _Places:
        """`places` without the special tokens of which the prompt has no part: they need no change,
        and a template that looks for them in messages still finds them."""
        present = {self._special[number].content for _, _, number in spans}
        spelled = ((span, self._special[span[2]].content) for span in places.whole)
        kept = [span for span, text in spelled if any(each in text for each in present)]
        return replace(places, whole=kept)

    def _places(self, strings: Sequence[str]) -> list[_Places]:
        """By string, the places that spell special tokens, or may form one with text that the
        template puts next to it. Identifiers, such as roles and names of fields, get no places at
        their ends, because templates compare them."""
        between = _unguessable(4)
        # the finder refuses lone surrogates
        joined = between.join(strings).encode(errors="replace").decode()
        spans = iter(self._spans(joined))
        found, start, span = [], 0, next(spans, None)
        for text in strings:
            end, whole = start + len(text), []
            while span is not None and span[0] < end:
                whole.append((span[0] - start, span[1] - start, span[2]))
                span = next(spans, None)
            longest = 0 if text.isidentifier() else min(len(text), self._longest)
            sizes = range(1, 1 + longest)
            before = any(text[:size] in self._endings for size in sizes)
            found.append(
                _Places(whole, before, any(text[-size:] in self._beginnings for size in sizes))
            )
            start = end + len(between)
        return found

    def _encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        with self._lock:
            plain = self._plain
        text = "".join(part if isinstance(part, str) else plain.stand_ins[part] for part in parts)
        ids = encode(plain.tokenizer, text)
        for token in ids:
            if token in self._special and token != plain.unknown:
                spelled = self._special[token].content
                raise PassError(
                    f"a message holds the text of the special token {spelled}, which the tokenizer "
                    "cannot encode as plain text; leave that text out"
                )
        return [plain.ids.get(token, token) for token in ids]

    @cached_property
    def _plain(self) -> _PlainTextTokenizer:
        """Made at first use, because it takes as much memory as the tokenizer."""
        written = self._tokenizer.to_str()
        model = json.loads(written)["model"]
        tokenizer = Tokenizer.from_str(written)
        tokenizer.encode_special_tokens = True
        secret = _unguessable(8)
        stand_ins = {
            number: secret
            + chr(PRIVATE_USE_START + place // 1024)
            + chr(PRIVATE_USE_START + place % 1024)
            for place, number in enumerate(self._special)
        }
        tokenizer.add_tokens(
            [
                AddedToken(
                    stand_ins[number], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                for number, token in self._special.items()
            ]
        )
        ids = {tokenizer.token_to_id(text) or 0: number for number, text in stand_ins.items()}
        unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
        return _PlainTextTokenizer(tokenizer, stand_ins, ids, unknown)

    def _spans(self, text: str) -> list[Span]:
        found = self._finder.encode(text)
        return [
            (*span, self._found[token])
            for span, token in zip(found.offsets, found.ids, strict=True)
            if token
        ]


@dataclass(frozen=True)
class _Places:
    """The places in a message's string to change: the special tokens that it spells (`whole`), and
    its first (`before`) or last (`after`) character, if that may form a special token with text of
    the template."""

    whole: Sequence[Span]
    before: bool
    after: bool

    def __bool__(self) -> bool:
        return bool(self.whole) or self.before or self.after


class _ExchangedCharacters:
    """Changes places to other characters, as many and of the same kind."""

    def __init__(self) -> None:
        self._others = _OtherCharacters()

    def change(self, text: str, places: _Places) -> str:
        """The string with its places changed."""
        written = list(text)
        for start, end, _ in places.whole:
            letters = [i for i in range(start, end) if text[i].isascii() and text[i].isalnum()]
            for i in letters or range(start, end):
                written[i] = text[i].translate(self._others)
        for i in (0,) * places.before + (len(text) - 1,) * places.after:
            written[i] = text[i].translate(self._others)
        return "".join(written)

    def kept(self, text: str, other: str, spans: Sequence[Span]) -> list[Span] | None:
        """Those of the special tokens in `other`, the prompt of changed messages, that are the same
        in `text`; None if the two texts differ in more than exchanged characters."""
        if len(text) != len(other):
            return None
        exchanged = text.translate(self._others)
        if any(b not in (a, c) for a, b, c in zip(text, other, exchanged, strict=True)):
            return None
        return [span for span in spans if text[span[0] : span[1]] == other[span[0] : span[1]]]


class _OtherCharacters(dict[int, int]):
    """By character, a random other one of the same kind, for `str.translate`."""

    def __init__(self) -> None:
        for characters in (string.ascii_lowercase, string.ascii_uppercase, string.digits, "<>"):
            turn = 1 + secrets.randbelow(len(characters) - 1)
            self |= str.maketrans(characters, characters[turn:] + characters[:turn])
        self._other = ord(_unguessable(1))

    def __missing__(self, _: int) -> int:
        return self._other


class _MarkedPlaces:
    """Puts marks before and after places."""

    def __init__(self) -> None:
        self._begin, self._end = _unguessable(4), _unguessable(4)

    def change(self, text: str, places: _Places) -> str:
        """The string with marks. Its start gets `_begin` and its end `_end`, so that a special
        token that the template writes between two strings does not stand between `_begin` and
        `_end`."""
        parts, done = [self._begin] if places.before else [], 0
        for start, end, _ in places.whole:
            parts += [text[done:start], self._begin, text[start:end], self._end]
            done = end
        return "".join([*parts, text[done:], self._end if places.after else ""])

    def kept(self, text: str, other: str, spans: Sequence[Span]) -> list[Span] | None:
        """The special tokens in `other` without marks, with their places in `text`; None if the
        two texts differ in more than marks."""
        found, place, done = [], 0, 0
        for start, end, number in spans:
            place += len(self._without(other[done:start]))
            if not (other.endswith(self._begin, 0, start) and other.startswith(self._end, end)):
                found.append((place, place + end - start, number))
            place, done = place + end - start, end
        return found if self._without(other) == text else None

    def _without(self, text: str) -> str:
        return text.replace(self._begin, "").replace(self._end, "")


def _parts(text: str, spans: Sequence[Span]) -> list[str | int]:
    """Text and ids of special tokens, in turn. spans: the special tokens."""
    parts: list[str | int] = []
    done = 0
    for start, end, number in spans:
        parts += [text[done:start], number]
        done = end
    return [*parts, text[done:]]


def _unguessable(length: int) -> str:
    return "".join(
        chr(PRIVATE_USE_START + secrets.randbelow(PRIVATE_USE_SIZE)) for _ in range(length)
    )


def _strings(value: Any) -> Iterator[str]:
    """Every string in `value`, names of fields too, in the order of `_replaced`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _replaced(value: Any, strings: Iterator[str]) -> Any:
    """`value` with other strings in place of its own."""
    if isinstance(value, str):
        return next(strings)
    if isinstance(value, Mapping):
        return {_replaced(key, strings): _replaced(item, strings) for key, item in value.items()}
    return (
        [_replaced(item, strings) for item in value] if isinstance(value, list | tuple) else value
    )
