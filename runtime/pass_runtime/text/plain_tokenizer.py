"""Tokens of plain text: what llguidance knows of a tokenizer.

Its own reading of a tokenizer finds added tokens in what a grammar forces, so that `{"const": "<|im_end|>"}` ends the
text, and refuses tokenizers that are not byte-level or byte-fallback.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from pass_runtime.text.vocabulary import Vocabulary

MOST_CHARACTERS = 1024


class PlainTokenizer:
    """Has the attributes that `llguidance.LLTokenizer` takes: the bytes of all tokens, and which of them are no text.

    Added tokens are no text: a grammar has them by their ids only (`<[7]>`), and text that spells one is written with
    other tokens. Added tokens that have no meaning of their own stay text: those of white space, and those whose text
    the other tokens cannot write.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """end_tokens: at least one."""
        self.eos_token_id = end_tokens[0]
        self.tokens = Vocabulary(tokenizer).all_bytes(vocab_size)
        self._encoder = _without_added_tokens(tokenizer)
        added = {n: token for n, token in tokenizer.get_added_tokens_decoder().items() if n < vocab_size}
        for n, token in added.items():  # also of special ones, which have no bytes in a text
            self.tokens[n] = token.content.encode()
        self._no_text = {*added, *end_tokens}
        self._by_bytes = {each: n for n, each in reversed([*enumerate(self.tokens)]) if each and n not in self._no_text}
        self._longest = max(map(len, self._by_bytes), default=0)
        for n in [n for n, token in added.items() if not token.special and n not in end_tokens]:
            if self.tokens[n].isspace() or not self._is_written(self.tokens[n].decode()):
                self._no_text.remove(n)
                self._by_bytes.setdefault(self.tokens[n], n)
                self._longest = max(self._longest, len(self.tokens[n]))
        self.special_token_ids = sorted(self._no_text)

    def __call__(self, text: str) -> list[int]:
        """The tokens whose bytes are those of `text`: the tokenizer's own if it has such, else the longest ones from
        left to right. They end before the first byte that no token has, and after MOST_CHARACTERS: what is forced is
        tokenized with every token of a text."""
        text = text[:MOST_CHARACTERS]
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        if self._no_text.isdisjoint(ids) and b"".join([self.tokens[i] for i in ids]) == text.encode():
            return ids
        return self._longest_tokens(text.encode())

    def _is_written(self, text: str) -> bool:
        """Whether other tokens can write all of a text."""
        return b"".join(self.tokens[i] for i in self._longest_tokens(text.encode())) == text.encode()

    def _longest_tokens(self, text: bytes) -> list[int]:
        ids: list[int] = []
        place = 0
        while place < len(text):
            for end in range(min(place + self._longest, len(text)), place, -1):
                if (token := self._by_bytes.get(text[place:end])) is not None:
                    ids.append(token)
                    place = end
                    break
            else:
                break
        return ids


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """Encodes text as it is in the middle of other text, and added tokens as what they are made of."""
    written = json.loads(tokenizer.to_str())
    written |= {"added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    for name in ("normalizer", "pre_tokenizer"):
        written[name] = _without_prefix(written[name])
    return Tokenizer.from_str(json.dumps(written))


def _without_prefix(step: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before a text; None if nothing is left of it."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        return step | {name: [left for each in step[name] if (left := _without_prefix(each)) is not None]}
    if step["type"] == "Metaspace":
        return step | {"prepend_scheme": "never"}
    return step | {"add_prefix_space": False} if "add_prefix_space" in step else step
