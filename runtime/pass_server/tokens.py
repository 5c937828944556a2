"""Single tokens as text and bytes, and log-probabilities in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_runtime.decode.sequence import Token
from pass_runtime.text.detokenizer import Detokenizer
from pass_runtime.text.vocabulary import Vocabulary


class TokenTexts:
    """The text and the bytes of single tokens. A token may be a part of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def bytes(self, token: int) -> bytes:
        """A token's bytes; a special token has those of its name."""
        special = self.vocabulary.special_text(token)
        return self.vocabulary.bytes(token) if special is None else special.encode()

    def text(self, token: int) -> str:
        """A token's text, or `bytes:\\xe2\\x82`, as OpenAI writes parts of characters."""
        found = self.bytes(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def completion_logprobs(texts: TokenTexts, tokens: Sequence[Token], before: Detokenizer) -> dict[str, Any]:
    """before: has read the tokens before these, and reads these.

    An offset is where a token's text begins, also if that text is held back or cut off for a stop string.
    """
    found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        assert token.logprobs is not None
        found["tokens"].append(texts.text(token.id))
        found["token_logprobs"].append(finite(token.logprobs.logprob))
        top: dict[str, float] = {}
        for other, value in token.logprobs.top:
            top.setdefault(texts.text(other), finite(value))  # of tokens with the same text the likeliest, the first
        found["top_logprobs"].append(top)
        before.push(token.id)
        found["text_offset"].append(before.place)
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
