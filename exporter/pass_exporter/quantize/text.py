"""Text to calibrate on: from a file, or written by the model itself."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from pass_runtime.errors import PassError

LENGTH = 256
SEQUENCES = 24
OWN_LENGTH = 192
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
    """[N,LENGTH]: at most SEQUENCES windows, spread over the whole text."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)]
    if len(windows) < 2:
        raise PassError(f"the text of --calibrate has {len(ids)} tokens; give one of at least {2 * LENGTH}")
    every = max(1, len(windows) // SEQUENCES)
    return torch.tensor(windows[::every][:SEQUENCES])


@torch.no_grad()
def own_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_length: int) -> torch.Tensor:
    """[prompts,OWN_LENGTH]: the model continues each of PROMPTS at temperature 1, the same every time."""
    prompts = [tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in PROMPTS]
    shortest = min(len(prompt) for prompt in prompts)
    random, cache = torch.Generator().manual_seed(SEED), DynamicCache()
    ids = window = torch.tensor([prompt[:shortest] for prompt in prompts])
    while ids.shape[1] < min(OWN_LENGTH, max_length):
        logits = model(input_ids=window, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        window = torch.multinomial(logits.float().softmax(-1), 1, generator=random)
        ids = torch.cat([ids, window], 1)
    return ids
