"""The field `logprobs` of an answer, in the shapes of completions and of chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pass_runtime import Detokenizer, Token, Vocabulary

MIN_LOGPROB = -9999.0
"""Stands for -inf, which JSON does not have."""


class TokenTexts:
    """The text and the bytes of single tokens. A token may be a part of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def bytes(self, token: int) -> bytes:
        """A token's bytes; a special token has those of its name."""
        special = self.vocabulary.special_text(token)
        return self.vocabulary.bytes(token) if special is None else special.encode()

    def text(self, token: int) -> str:
        """A token's text; a part of a character as OpenAI writes it, such as `bytes:\\xe2\\x82`."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def finite(logprob: float) -> float:
    """The log-probability, at least MIN_LOGPROB."""
    return max(logprob, MIN_LOGPROB)


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[Token], detokenizer: Detokenizer
) -> dict[str, Any]:
    """`logprobs` of a completion, for `tokens`. detokenizer: has read the prompt and the tokens
    before these, and now reads these.

    An offset is where a token's text begins, even if a stop string holds that text back or cuts it
    off.
    """
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists: dict[str, list[Any]] = {name: [] for name in names}
    for token in tokens:
        assert token.logprobs is not None
        top: dict[str, float] = {}
        for other, value in token.logprobs.top:
            # Of tokens with the same text, the first is the likeliest.
            top.setdefault(texts.text(other), finite(value))
        detokenizer.push(token.id)
        logprob = finite(token.logprobs.logprob)
        values = (texts.text(token.id), logprob, top, detokenizer.token_start)
        for name, entry in zip(names, values, strict=True):
            lists[name].append(entry)
    return lists


def chat_logprobs(texts: TokenTexts, tokens: Sequence[Token]) -> dict[str, Any]:
    """`logprobs` of a chat, for `tokens`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = list(texts.bytes(token))
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": content}

    entries = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(other, value) for other, value in token.logprobs.top]
        entries.append(entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
    return {"content": entries, "refusal": None}
