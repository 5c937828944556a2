"""Tokenizes prompts, and continues a batch of them with the frozen model in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def chat_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """Return the chat template with the user's message `text`, up to where the answer begins."""
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def plain_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the token ids of `text` without added special tokens: chat templates contain them."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.no_grad()
def continue_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    eos_token_ids: Sequence[int],
    **sampling: Any,
) -> list[list[int]]:
    """Return up to `tokens` new tokens for each prompt, padded to the same number for all prompts.

    `until_end` removes the padding. sampling: arguments of transformers' `generate`.
    """
    width = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    out = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
        # A dynamic cache is copied for every token, which takes a CPU 1.5 times as long.
        cache_implementation="static",
        disable_compile=True,
        repetition_penalty=1.0,  # overrides generation_config.json
        **sampling,
    )
    continuations: list[list[int]] = out[:, width:].tolist()
    return continuations


def until_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first end token, or all if there is none."""
    last = next((i for i, token in enumerate(tokens) if token in eos_token_ids), len(tokens) - 1)
    return tokens[: last + 1]
