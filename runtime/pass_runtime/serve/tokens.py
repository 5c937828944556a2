"""Single tokens as text and bytes, and log-probabilities in the shapes of both endpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.decode.sequence import Token

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level tokenizers (GPT-2's) write bytes, and those bytes."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """The text and the bytes of single tokens. A token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._alphabet = _byte_alphabet() if decoder is not None and b"ByteLevel" in decoder.__getstate__() else None
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def text(self, token: int) -> str:
        """A token's text, or `bytes:\\xe2\\x82`, as OpenAI writes parts of characters."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def longest(self) -> int:
        """The number of bytes of the longest token."""
        return max(len(self._bytes(token)) for token in self._tokenizer.get_vocab().values())

    def _bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # a padded vocabulary has ids without a token
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in piece if character in self._alphabet)
        if match := _BYTE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("\u2581", " ").encode()


def completion_logprobs(texts: TokenTexts, tokens: Sequence[Token], offset: int) -> dict[str, Any]:
    """offset: the number of characters of the text before these tokens."""
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        assert token.logprobs is not None
        found["tokens"].append(texts.text(token.id))
        found["token_logprobs"].append(finite(token.logprobs.logprob))
        found["top_logprobs"].append({texts.text(other): finite(value) for other, value in token.logprobs.top})
        found["text_offset"].append(offset)
        offset += len(token.text)
    return found


def chat_logprobs(texts: TokenTexts, tokens: Sequence[Token]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": list(texts.bytes(token))}

    content = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(other, value) for other, value in token.logprobs.top]
        content.append(entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def finite(logprob: float) -> float:
    """The value, or -9999 for -inf, which JSON does not have."""
    return max(logprob, -9999.0)
