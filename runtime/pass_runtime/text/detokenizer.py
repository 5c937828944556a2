"""Turns tokens into text, one by one, and finds the stop strings that end it.

The tokenizers library decodes whole lists alone. Its decoders treat every token alone, but for the
first one, white space at the beginning, and characters with bytes in several tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from encodings.utf_8 import IncrementalDecoder
from functools import lru_cache
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.bad_words import ROOT, Automaton

MAX_UNBATCHED_LENGTH = 1 << 10
"""The most characters or tokens for `Tokenizer.encode` and `decode`, which hold Python's GIL."""
MAX_CHARACTER_BYTES = 3
"""The most bytes of an incomplete character."""


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    if len(text) <= MAX_UNBATCHED_LENGTH:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    if len(ids) <= MAX_UNBATCHED_LENGTH:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TOKENWISE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
"""Decoders that treat every token alone, and may be combined."""


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """The bytes that each token adds to a text. Any thread may call the methods.

    bytes: returns those of a token that is not the first. strip: what is removed from a text's
    beginning, and how often at most. byte_fallback: whether each byte of an incomplete character
    becomes U+FFFD, or all of them one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        steps = _steps(None if self._decoder is None else json.loads(self._decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        strips_end = any(step["type"] == "Strip" and step["stop"] for step in steps)
        if strips_end or not (self._byte_level or _TOKENWISE_DECODERS.issuperset(kinds)):
            raise PassError(
                f"the tokenizer's decoder ({', '.join(kinds)}) is not supported; use another model"
            )
        self.strip: tuple[bytes, int] = (b"", 0)
        self.byte_fallback = "ByteFallback" in kinds
        self._first_differs = self._decoder is None or bool({"Metaspace", "WordPiece"} & set(kinds))
        # Before `Fuse`, `Strip` strips every token, as `_bytes` does.
        after_fuse = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
        strips = [step for step in after_fuse if step["type"] == "Strip"]
        if strips:
            self.strip = strips[0]["content"].encode(), int(strips[0]["start"])
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self._tokenizer,)  # The cache cannot be pickled.

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes of the first token of a text, before `strip` is applied."""
        return self._bytes(token, first=True) if self._first_differs else self.bytes(token)

    def is_text(self, token: int) -> bool:
        piece = self._tokenizer.id_to_token(token)
        return piece is not None and piece not in self._special

    def special(self, text: str) -> int | None:
        return self._tokenizer.token_to_id(text) if text in self._special else None

    def special_text(self, token: int) -> str | None:
        """Return the text of a special token; None for other ids."""
        return piece if (piece := self._tokenizer.id_to_token(token)) in self._special else None

    def longest(self) -> int:
        regular = (self._bytes(token) for token in self._tokenizer.get_vocab().values())
        return max(map(len, chain(regular, (text.encode() for text in self._special))), default=0)

    def all_bytes(self, count: int) -> list[bytes]:
        return [self._bytes(token) for token in range(count)]

    def _bytes(self, token: int, *, first: bool = False) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or piece in self._special:
            return b""
        if self._byte_level:
            try:
                return bytes([_ALPHABET[character] for character in piece])
            except KeyError:  # An added token may have any characters.
                return piece.encode()
        if self.byte_fallback and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        before = [] if first else ["a"]
        join = " ".join if self._decoder is None else self._decoder.decode
        text = join([*before, piece])
        return text.removeprefix("".join(before)).encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


_EACH_BYTE_HANDLER = "pass-replace-each-byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE_HANDLER, _replace_each_byte)


class _Decoder(IncrementalDecoder):
    """Python's decoder, which also waits for the third byte of a surrogate; UTF-8 has none."""

    def decode(self, added: Any, final: bool = False) -> str:
        text, held = super().decode(added, final), self.getstate()[0]
        if held[:1] == b"\xed" and held[1:] >= b"\xa0":
            self.reset()
            text += held.decode(errors=self.errors)
        return text


class Detokenizer:
    """Turns the tokens after a prompt into text. The beginning of a character is held back, also
    one in the prompt. token_start: the offset in characters of the newest token's text, or of the
    character that it continues."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int] = (),
        shown_special_tokens: Sequence[int] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._shown = {
            token: vocabulary.special_text(token) or "" for token in shown_special_tokens
        }
        self._strip, self._strips_left = vocabulary.strip
        self._first = True  # no token so far is text
        errors = _EACH_BYTE_HANDLER if vocabulary.byte_fallback else "replace"
        self._decoder = _Decoder(errors)
        for token in prompt:
            if not self._first and not self._strips_left:
                break
            self._bytes(token)
        end = b""
        for token in reversed(prompt):
            if len(end) >= MAX_CHARACTER_BYTES:
                break
            end = vocabulary.bytes(token) + end
        self._decoder.decode(end)
        self._shown_in_prompt = self._decoder.getstate()[0].decode(errors=errors)
        self.token_start = self._length = 0

    def push(self, token: int) -> str:
        """Take the next token. Return the text that is final now."""
        self.token_start = self._length
        added = self._shown[token].encode() if token in self._shown else self._bytes(token)
        if not added:
            return ""
        held = self._decoder.getstate()[0]
        if held and len((held + added[:1]).decode(errors="replace")) > 1:
            # The held character is now shown before `token` as U+FFFD.
            held_text = held.decode(errors=self._decoder.errors)
            self.token_start += len(held_text) - len(self._shown_in_prompt)
        text = self._decoder.decode(added)
        if self._shown_in_prompt and text:
            text, self._shown_in_prompt = text.removeprefix(self._shown_in_prompt), ""
        self._length += len(text)
        return text

    def _bytes(self, token: int) -> bytes:
        if self._first and self._vocabulary.is_text(token):
            self._first, added = False, self._vocabulary.first_bytes(token)
        else:
            added = self._vocabulary.bytes(token)
        if self._strips_left and added:
            while self._strips_left and added.startswith(self._strip):
                added, self._strips_left = added[len(self._strip) :], self._strips_left - 1
            if added:
                self._strips_left = 0
        return added


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._beginnings = frozenset(stop[0] for stop in stops if stop)
        self._state = ROOT
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Take the next part of the text. Return what to show, and the stop string that ended the
        text or None."""
        if self._state == ROOT and self._beginnings.isdisjoint(text):  # the usual case
            return text, None
        automaton, state = self._automaton, self._state
        for length, character in enumerate(text, 1):
            state = automaton.step(state, character)
            if may_end and (size := automaton.word_length[state]):
                unshown = self._held + text[:length]
                self._state, self._held = ROOT, ""
                return unshown[:-size], unshown[-size:]
        self._state, unshown = state, self._held + text
        final = len(unshown) - automaton.depth[state]
        self._held = unshown[final:]
        return unshown[:final], None

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held, self._state = self._held, "", ROOT
        return held


@lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> Automaton:
    return Automaton(stops)


class TextStream:
    """Turns the tokens of one request into text, until a stop string or its special token ends it.
    min_tokens: how many tokens at first do not end the text."""

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_special_tokens: Sequence[int] = (),
    ) -> None:
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._filter = StopFilter(stop)
        self._special = {
            token for string in stop if (token := self._vocabulary.special(string)) is not None
        }
        self._detokenizer = Detokenizer(self._vocabulary, prompt_ids, shown_special_tokens)
        self._tokens_before_stop = min_tokens

    def read(self, token: int) -> tuple[str, str | None]:
        """Return the text that is final now, and the stop string that ends it or None."""
        may_end = self._tokens_before_stop == 0
        if not may_end:
            self._tokens_before_stop -= 1
        if may_end and token in self._special:
            return self._filter.flush(), self._vocabulary.special_text(token)
        return self._filter.push(self._detokenizer.push(token), may_end=may_end)

    def flush(self) -> str:
        """Return the text that was held back."""
        return self._filter.flush()
