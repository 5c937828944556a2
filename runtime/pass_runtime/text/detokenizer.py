"""Turns tokens into text, one by one, and finds the stop strings that end it (`TextStream`). Also
encodes and decodes whole texts (`encode`, `decode`).

`Tokenizer.encode` and `decode` hold Python's GIL, for about a second per megabyte. Their batch
versions release it.

The tokenizers library decodes whole lists of tokens only. But its decoders treat every token alone,
with three exceptions: the first token, white space that is stripped from the text's beginning, and
characters whose bytes are in several tokens. So a text is the joined bytes of its tokens
(`Vocabulary`), and `Detokenizer` treats the exceptions.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.errors import PassError
from pass_runtime.text.bad_words import ROOT, Automaton

MAX_UNBATCHED_LENGTH = 1 << 10
"""Up to this many characters or tokens, the batch version takes longer than the plain one."""


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of `text`, as `Tokenizer.encode` does."""
    if len(text) <= MAX_UNBATCHED_LENGTH:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of `ids`, as `Tokenizer.decode` does."""
    if len(ids) <= MAX_UNBATCHED_LENGTH:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of a single byte, in tokenizers with byte fallback."""
_TOKENWISE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
"""Decoders that treat every token alone, and may be combined. (`ByteLevel` does so by itself.)"""
_PRECEDING_TOKEN = "a"
"""A token that is decoded before another, so that the other is not the first of a text."""


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character stands for in byte-level tokenizers, such as GPT-2's."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """The bytes that each token of a tokenizer adds to a text. Any thread may call the methods.

    bytes: returns the bytes of a token id in a text that has other tokens before it. strip: bytes
    that are removed from a text's beginning, and how often at most. byte_fallback: whether each
    byte of an incomplete character is shown as U+FFFD (as by Llama 2's tokenizer), or all of them
    as one U+FFFD (as by GPT-2's).

    Raises PassError if the tokenizer's decoder does not treat every token alone.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        steps = _steps(None if self._decoder is None else json.loads(self._decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        # Whether a token is the last of a text, whose end is stripped, is not known when it comes.
        strips_end = any(step["type"] == "Strip" and step["stop"] for step in steps)
        if strips_end or not (self._byte_level or _TOKENWISE_DECODERS.issuperset(kinds)):
            raise PassError(
                f"the tokenizer's decoder ({', '.join(kinds)}) is not supported; use another model"
            )
        self.strip: tuple[bytes, int] = (b"", 0)
        self.byte_fallback = "ByteFallback" in kinds
        # whether the first token of a text has other bytes than the same token later
        self._first_differs = self._decoder is None or bool({"Metaspace", "WordPiece"} & set(kinds))
        # Before `Fuse`, which joins the tokens, `Strip` strips every token, as `_bytes` does.
        after_fuse = steps[kinds.index("Fuse") :] if "Fuse" in kinds else []
        strips = [step for step in after_fuse if step["type"] == "Strip"]
        if strips:
            self.strip = strips[0]["content"].encode(), int(strips[0]["start"])
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Vocabulary, (self._tokenizer,)  # The cache cannot be pickled.

    def first_bytes(self, token: int) -> bytes:
        """Return the bytes of `token` as the first token of a text, before `strip` is applied."""
        return self._bytes(token, first=True) if self._first_differs else self.bytes(token)

    def is_text(self, token: int) -> bool:
        """Whether `token` is an id of the tokenizer and not a special token."""
        piece = self._tokenizer.id_to_token(token)
        return piece is not None and piece not in self._special

    def special(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if there is none."""
        return self._tokenizer.token_to_id(text) if text in self._special else None

    def special_text(self, token: int) -> str | None:
        """Return the text of a special token, which is not shown; None for other ids."""
        return piece if (piece := self._tokenizer.id_to_token(token)) in self._special else None

    def longest(self) -> int:
        """Return how many bytes the longest token has, special tokens included."""
        regular = (self._bytes(token) for token in self._tokenizer.get_vocab().values())
        return max(map(len, chain(regular, (text.encode() for text in self._special))), default=0)

    def all_bytes(self, count: int) -> list[bytes]:
        """Return `bytes` of each id below `count`."""
        return [self._bytes(token) for token in range(count)]

    def _bytes(self, token: int, *, first: bool = False) -> bytes:
        """Return what `token` adds to a text (as its `first` token); b"" for special tokens."""
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
        before = [] if first else [_PRECEDING_TOKEN]
        join = " ".join if self._decoder is None else self._decoder.decode
        text = join([*before, piece])
        return text.removeprefix("".join(before)).encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the decoders of which a tokenizer's `decoder` consists, in order."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


REPLACEMENT = "\ufffd"
"""What is shown in place of bytes that are part of no character."""
_EACH_BYTE_HANDLER = "pass-replace-each-byte"
"""The name of `_replace_each_byte` among the error handlers of `bytes.decode`."""
_MAX_PARTIAL_BYTES = 3
"""The most bytes of an incomplete character."""
_PARTIAL_CHARACTER = re.compile(
    rb"(?:[\xc2-\xdf]|\xe0[\xa0-\xbf]?|\xed[\x80-\x9f]?|[\xe1-\xec\xee\xef][\x80-\xbf]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2})\Z"
)
"""The last bytes of a text if they begin a character (table 3-7 of the Unicode standard)."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE_HANDLER, _replace_each_byte)


class Detokenizer:
    """Turns the tokens after a prompt into text, one by one.

    Bytes that are part of no character are shown as U+FFFD, as the tokenizer's decoder shows them.
    The beginning of a character is held back until the next tokens show whether they complete it,
    and dropped if the text ends before. A character that begins in the prompt belongs to the text
    if the text completes it.

    token_start: the offset in the text, in characters, at which the newest token's text begins. If
    this token continues a character, it is the offset of that character.
    """

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
        self._first = True  # whether prompt and text have no token yet that is text
        self._errors = _EACH_BYTE_HANDLER if vocabulary.byte_fallback else "replace"
        self._held = b""  # the bytes of a character that is not complete
        # how the prompt's own text shows the held bytes: as U+FFFD, or "" if there are none
        self._shown_in_prompt = self._read_prompt(prompt)
        self.token_start = self._length = 0

    def push(self, token: int) -> str:
        """Take the next token. Return the text that is final now."""
        self.token_start = self._length
        added = self._shown[token].encode() if token in self._shown else self._bytes(token)
        if not added:
            return ""
        if self._held and len((self._held + added[:1]).decode(errors="replace")) > 1:
            # `token` does not continue the held character, which is now shown before it as U+FFFD.
            held_text = self._held.decode(errors=self._errors)
            self.token_start += len(held_text) - len(self._shown_in_prompt)
        text = self._decode(added)
        if self._shown_in_prompt and text:
            text, self._shown_in_prompt = text.removeprefix(self._shown_in_prompt), ""
        self._length += len(text)
        return text

    def _decode(self, added: bytes) -> str:
        """Return the text of the held bytes and `added`, but for a character begun at the end."""
        joined = self._held + added
        beginning = _PARTIAL_CHARACTER.search(joined, max(0, len(joined) - _MAX_PARTIAL_BYTES))
        end = beginning.start() if beginning else len(joined)
        self._held = joined[end:]
        return joined[:end].decode(errors=self._errors)

    def _bytes(self, token: int) -> bytes:
        """Return what the next token adds, without what is stripped from the text's beginning."""
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

    def _read_prompt(self, prompt: Sequence[int]) -> str:
        """Find whether the text's beginning is still to be stripped, and hold the bytes of a
        character that the prompt does not complete. Return how the prompt shows them."""
        for token in prompt:
            if not self._first and not self._strips_left:
                break
            self._bytes(token)
        end = b""
        for token in reversed(prompt):
            if len(end) >= _MAX_PARTIAL_BYTES:
                break
            end = self._vocabulary.bytes(token) + end
        self._decode(end)
        return self._held.decode(errors=self._errors)


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._beginnings = frozenset(stop[0] for stop in stops if stop)
        self._state = ROOT
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Take the next part of the text. Return what to show, and the stop string that ended the
        text or None. The stop string that is complete first ends the text, and is not shown.

        may_end: whether a stop string that `text` completes ends the text."""
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
        """Return the text that was held back, after the last `push`."""
        held, self._held, self._state = self._held, "", ROOT
        return held


@lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> Automaton:
    """Return the automaton that finds these stop strings; equal requests share it."""
    return Automaton(stops)


class TextStream:
    """Turns the tokens of one request into text, one by one, until a stop string ends it.

    stop: strings that end the text and are not part of it. A stop string that is the text of a
    special token ends the text at that token, although the text does not show special tokens.
    min_tokens: how many tokens at first do not end the text. shown_special_tokens: special tokens
    that are shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_special_tokens: Sequence[int] = (),
    ) -> None:
        """tokenizer: a vocabulary, or the tokenizer from which to make one, in milliseconds."""
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._filter = StopFilter(stop)
        self._special = {
            token for string in stop if (token := self._vocabulary.special(string)) is not None
        }
        self._detokenizer = Detokenizer(self._vocabulary, prompt_ids, shown_special_tokens)
        self._tokens_before_stop = min_tokens  # how many more tokens do not end the text

    def read(self, token: int) -> tuple[str, str | None]:
        """Return the text that is final with `token`, and the stop string that ends it or None."""
        may_end = self._tokens_before_stop == 0
        if not may_end:
            self._tokens_before_stop -= 1
        if may_end and token in self._special:
            return self._filter.flush(), self._vocabulary.special_text(token)
        return self._filter.push(self._detokenizer.push(token), may_end=may_end)

    def flush(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._filter.flush()
