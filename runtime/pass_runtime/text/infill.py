"""Prompts after which a model writes what stands between two texts (fill in the middle)."""

from __future__ import annotations

from tokenizers import Tokenizer

from pass_runtime.text.detokenizer import encode

CONVENTIONS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)
ENDS = (
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    *("<fim_pad>", "<fim-pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "▁<EOT>"),
    *("<|endoftext|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>"),
)
"""Other tokens with which models end what they write."""


class Infill:
    """Makes the prompts of one tokenizer. end_token_ids: tokens that end the answer."""

    def __init__(self, tokenizer: Tokenizer, markers: list[int]) -> None:
        self._tokenizer, self._markers = tokenizer, markers
        ends = (tokenizer.token_to_id(token) for token in ENDS)
        self.end_token_ids = (*markers, *(token for token in ends if token is not None))
        plain, whole = (encode(tokenizer, "a", add_special_tokens=each) for each in (False, True))
        self._start = whole[: whole.index(plain[0])]

    def encode(self, prefix: str, suffix: str) -> list[int]:
        before, after, gap = self._markers
        return [
            *(*self._start, before, *encode(self._tokenizer, prefix)),
            *(after, *self._encode_suffix(suffix), gap),
        ]

    def _encode_suffix(self, text: str) -> list[int]:
        newline = encode(self._tokenizer, "\n")
        if len(newline) > 1:  # a space, and a token that merges with no other
            return encode(self._tokenizer, f"\n{text}")[len(newline) :]
        return encode(self._tokenizer, text)


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """Return what makes the prompts; None if the tokenizer has no tokens for them."""
    for texts in CONVENTIONS:
        ids = (tokenizer.token_to_id(text) for text in texts)
        markers = [token for token in ids if token is not None]
        if len(markers) == len(texts):
            return Infill(tokenizer, markers)
    return None
