"""Tokenizes prompts, and continues a batch of them by the frozen model in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """Return the chat template with `text` as the user's message, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Tokenize without adding special tokens, because the text of a chat template contains them already."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], most: int, ends: Sequence[int], **sampling: Any
) -> list[list[int]]:
    """Return up to `most` new tokens for each prompt. sampling: arguments of transformers' `generate`.

    All rows of the batch have the same length, so a row may have padding after its end token; `until_end` removes it.
    """
    widest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), widest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, widest - len(prompt) :] = torch.tensor(prompt)
        mask[row, widest - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=most,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        cache_implementation="static",  # a dynamic cache is copied at every step: 1.5 times the time on a CPU
        disable_compile=True,
        repetition_penalty=1.0,  # overrides generation_config.json
        **sampling,
    )
    lines: list[list[int]] = out[:, widest:].tolist()
    return lines


def until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first of `ends`, after which there is padding."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: at + 1]
