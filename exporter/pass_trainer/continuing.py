"""A frozen model in torch: prompts as it is given them, and what it writes behind a batch of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """`text` as a user's message in the chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Without the tokenizer's own special tokens, which a chat template writes itself."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], most: int, ends: Sequence[int], **sampling: Any
) -> list[list[int]]:
    """Up to `most` tokens behind each prompt, in one batch, as `sampling` tells transformers' generate. A line goes on
    behind an end token, for as long as others do: see `until_end`."""
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
        cache_implementation="static",  # a growing cache is copied at every step: 1.5 times the time on a CPU
        disable_compile=True,
        repetition_penalty=1.0,  # a generation_config.json may ask for another
        **sampling,
    )
    lines: list[list[int]] = out[:, widest:].tolist()
    return lines


def until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Up to the first of `ends`, which stays; what follows is padding."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: at + 1]
