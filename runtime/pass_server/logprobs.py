"""Makes the field `logprobs` of an answer, which differs between completions and chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pass_runtime import Detokenizer, Generation, Token, Vocabulary

MIN_LOGPROB = -9999.0
"""The log-probability that stands for -inf, which JSON does not have."""


class TokenTexts:
    """Gives the text and the bytes of single tokens, which may be parts of a character."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; those of a special token are its name in UTF-8."""
        special = self.vocabulary.special_text(token)
        return self.vocabulary.bytes(token) if special is None else special.encode()

    def text(self, token: int) -> str:
        """Return a token's text; a part of a character in OpenAI's form, as `bytes:\\xe2\\x82`."""
        content = self.bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def finite(logprob: float) -> float:
    """Return the log-probability, or MIN_LOGPROB if it is less."""
    return max(logprob, MIN_LOGPROB)


def completion_logprobs(
    texts: TokenTexts, tokens: Sequence[Token], detokenizer: Detokenizer, start: int = 0
) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion for `tokens`. detokenizer: has read all tokens before
    these, and reads these now. start: the length of the prompt in the answer. An offset is where a
    token's text begins in the answer, even if that text is held back or cut off by a stop
    string."""
    offsets = []
    for token in tokens:
        detokenizer.push(token.id)
        offsets.append(start + detokenizer.token_start)
    return _columns(texts, tokens, offsets)


def prompt_logprobs(
    texts: TokenTexts, generation: Generation, offsets: Iterable[int]
) -> dict[str, list[Any]]:
    """Return `logprobs` of a completion for its prompt. offsets: of the prompt's tokens."""
    logprobs = generation.prompt_logprobs or ()
    tokens = [
        Token(token, "model", of_token)
        for token, of_token in zip(generation.prompt_ids, logprobs, strict=True)
    ]
    return _columns(texts, tokens, offsets)


def _columns(
    texts: TokenTexts, tokens: Sequence[Token], offsets: Iterable[int]
) -> dict[str, list[Any]]:
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    lists: dict[str, list[Any]] = {name: [] for name in names}
    for token, offset in zip(tokens, offsets, strict=True):
        logprob, top = None, None
        if token.logprobs is not None:  # None for the first token of a prompt
            logprob, top = finite(token.logprobs.logprob), dict[str, float]()
            for other, value in token.logprobs.top:
                # Tokens may have the same text. The likeliest of them comes first, and is kept.
                top.setdefault(texts.text(other), finite(value))
        values = (texts.text(token.id), logprob, top, offset)
        for name, entry in zip(names, values, strict=True):
            lists[name].append(entry)
    return lists


def chat_logprobs(texts: TokenTexts, tokens: Sequence[Token]) -> dict[str, Any]:
    """Return `logprobs` of a chat for `tokens`."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        content = list(texts.bytes(token))
        return {"token": texts.text(token), "logprob": finite(logprob), "bytes": content}

    entries = []
    for token in tokens:
        assert token.logprobs is not None
        top = [entry(other, value) for other, value in token.logprobs.top]
        entries.append(entry(token.id, token.logprobs.logprob) | {"top_logprobs": top})
    return {"content": entries, "refusal": None}
