"""Texts to token ids and back without Python's lock, which `Tokenizer.encode` and `decode` hold until they are done: a
second for a megabyte, in which no other thread decodes or answers. Their forms for batches release it."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

SHORT = 1 << 10
"""Characters, or tokens: up to so many, holding the lock takes less time than a batch."""


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """The token ids of `text`, as `Tokenizer.encode` gives them."""
    if len(text) <= SHORT:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)


def decode(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """The text of `ids`, as `Tokenizer.decode` gives it."""
    if len(ids) <= SHORT:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
