"""Text to calibrate on: from a file, or written by the model itself."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.progress import Step
from pass_exporter.quantize.bf16 import bf16_copy, uses_bf16
from pass_runtime.errors import PassError

WINDOW_TOKENS = 256
MAX_WINDOWS = 24
OWN_SEQUENCES, OWN_TOKENS, SEQUENCES_PER_ROW = 32, 96, 2
"""Size of the text that the model writes: many short sequences in one batch, because another one
costs little. Each row joins several of them, because a row's first token has unusual
activations."""
SEED = 0
PROMPTS = (
    "The history of",
    "Question: What is",
    "In mathematics, a",
    "def main(",
    "import os\nimport",
    "Once upon a time",
    "The city of",
    "class Node:",
    "Abstract: We",
    "# Introduction",
    "According to the",
    "#include <stdio.h>",
    "Dear Sir or Madam,",
    "The film was released",
    "In biology, cells",
    "<html>",
)


def file_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    """[N,WINDOW_TOKENS]: at most MAX_WINDOWS windows, spread over the whole text. Raises PassError
    if it is short."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    windows = [
        ids[start : start + WINDOW_TOKENS]
        for start in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
    ]
    if len(windows) < 2:
        raise PassError(
            f"the text of --calibrate has {len(ids)} tokens; give one of at least "
            f"{2 * WINDOW_TOKENS}"
        )
    every = max(1, len(windows) // MAX_WINDOWS)
    return torch.tensor(windows[::every][:MAX_WINDOWS])


@torch.no_grad()
def own_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_length: int, step: Step
) -> torch.Tensor:
    """Let the model continue PROMPTS at temperature 1: [16,192], shorter if `max_length` is less.

    The text is the same on every call. The sequences of a row have the same prompt.
    """
    prompts = [
        tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        for prompt in PROMPTS
    ]
    shortest = min(len(prompt) for prompt in prompts)
    length = min(OWN_TOKENS, max_length // SEQUENCES_PER_ROW)
    random, cache = torch.Generator().manual_seed(SEED), DynamicCache()
    ids = window = torch.tensor([prompt[:shortest] for prompt in prompts]).repeat(
        OWN_SEQUENCES // len(prompts), 1
    )
    writer = bf16_copy(model) if uses_bf16(model) else model
    while ids.shape[1] < length:
        last = writer.model(
            input_ids=window, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        window = _sampled(writer.lm_head(last).float(), random)
        ids = torch.cat([ids, window], 1)
        step(ids.shape[1], length)
    return torch.cat(ids.chunk(SEQUENCES_PER_ROW), 1)


def _sampled(logits: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """[N,V] -> [N,1]: draws one number per row; `torch.multinomial` would draw one per token."""
    below = logits.softmax(-1).cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=random) * below[:, -1:]
    return torch.searchsorted(below, drawn, right=True).clamp_(max=logits.shape[1] - 1)
