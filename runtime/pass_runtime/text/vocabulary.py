"""What each token of a tokenizer adds to a text, in bytes.

The tokenizers library decodes lists of tokens. Its decoders treat tokens one by one, but for the first of a text, white
space that is stripped from the text's beginning, and characters whose bytes are several tokens. So a text is the bytes
of its tokens, one after the other (`pass_runtime.text.detokenizer`).
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.errors import PassError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
"""Decoders that may follow each other and treat tokens one by one. `ByteLevel` is another one, without company."""
_BEFORE = "a"
"""A token that may stand before any other one."""


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2's) write bytes, and those bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


class Vocabulary:
    """The tokens of a tokenizer as bytes of a text. Any thread may call it.

    strip: a text loses this content at its beginning, so many times at most. byte_fallback: whether a byte that is part
    of no character is one U+FFFD, as in Llama 2's tokenizers; else one stands for all bytes of a character that was
    begun, as in GPT-2's.

    Raises PassError if the tokenizer has a decoder whose text is not that of its tokens one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._decoder = tokenizer, tokenizer.decoder
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
        steps = _steps(None if self._decoder is None else json.loads(self._decoder.__getstate__()))
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        at_the_end = any(step["type"] == "Strip" and step["stop"] for step in steps)  # a stream does not know its end
        if at_the_end or not (self._byte_level or _STEPS.issuperset(kinds)):
            raise PassError(f"the tokenizer's decoder ({', '.join(kinds)}) is none that this runtime turns into text")
        self.strip: tuple[bytes, int] = (b"", 0)
        self.byte_fallback = "ByteFallback" in kinds
        self._first_differs = self._decoder is None or not {"Metaspace", "WordPiece"}.isdisjoint(kinds)
        strips = [step for step in steps[kinds.index("Fuse") :] if step["type"] == "Strip"] if "Fuse" in kinds else []
        if strips:
            self.strip = strips[0]["content"].encode(), int(strips[0]["start"])
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def first(self, token: int) -> bytes:
        """What `token` is at the beginning of a text, before anything is stripped from it."""
        return self._bytes(token, first=True) if self._first_differs else self.bytes(token)

    def is_text(self, token: int) -> bool:
        """Whether `token` is one, and is not special."""
        return (piece := self._tokenizer.id_to_token(token)) is not None and piece not in self._special

    def special(self, text: str) -> int | None:
        """The id of the special token whose text is `text`; None if there is none."""
        return self._tokenizer.token_to_id(text) if text in self._special else None

    def special_text(self, token: int) -> str | None:
        """The text of a special token, which is not shown; None for any other id."""
        return piece if (piece := self._tokenizer.id_to_token(token)) in self._special else None

    def longest(self) -> int:
        """The number of bytes of the longest token, special ones too."""
        regular = (self._bytes(token) for token in self._tokenizer.get_vocab().values())
        return max(map(len, chain(regular, (text.encode() for text in self._special))), default=0)

    def all_bytes(self, count: int) -> list[bytes]:
        """`bytes` of the ids below `count`."""
        return [self._bytes(token) for token in range(count)]

    def _bytes(self, token: int, *, first: bool = False) -> bytes:
        """What `token` adds to a text that has others before it; b"" if it is special or no token."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None or piece in self._special:
            return b""
        if self._byte_level:
            try:
                return bytes([_ALPHABET[character] for character in piece])
            except KeyError:  # an added token, which may have any characters
                return piece.encode()
        if self.byte_fallback and (match := _BYTE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        before = [] if first else [_BEFORE]
        text = " ".join([*before, piece]) if self._decoder is None else self._decoder.decode([*before, piece])
        return text.removeprefix("".join(before)).encode()


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoders of which a decoder is made, in their order."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]
