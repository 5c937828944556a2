"""Gets the token ids to calibrate on: from a file's text, or written by the model itself."""

from __future__ import annotations

import copy

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.progress import Step
from pass_runtime.errors import PassError

FILE_TOKENS, MAX_FILE_SEQUENCES = 256, 24
OWN_SEQUENCES, OWN_TOKENS, SEQUENCES_PER_ROW = 32, 96, 2
"""Sequences of one batch, tokens of each, and how many are joined to a row. A row's first token has
unusual activations, so few rows are better."""
SEED = 0
CPU_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""bf16 instruction sets of x86 and Arm CPUs. On CPUs without any, bf16 is slow."""
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
    """Return ids [N,FILE_TOKENS] of N <= MAX_FILE_SEQUENCES sequences at equal distances in `text`.
    Raises PassError if it has fewer than two."""
    ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    sequences = [
        ids[start : start + FILE_TOKENS]
        for start in range(0, len(ids) - FILE_TOKENS + 1, FILE_TOKENS)
    ]
    if len(sequences) < 2:
        raise PassError(
            f"the text of --calibrate has {len(ids)} tokens; give one of at least {2 * FILE_TOKENS}"
        )
    stride = max(1, len(sequences) // MAX_FILE_SEQUENCES)
    return torch.tensor(sequences[::stride][:MAX_FILE_SEQUENCES])


@torch.no_grad()
def own_ids(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, max_length: int, step: Step
) -> torch.Tensor:
    """Return ids [16,192] that the model writes after PROMPTS at temperature 1, always the same.
    Rows have at most `max_length` tokens. The sequences of a row have the same prompt."""
    prompts = [
        tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        for prompt in PROMPTS
    ]
    # Prompts are cut to the length of the shortest, so that the batch needs no padding.
    prompt_length = min(len(prompt) for prompt in prompts)
    length = min(OWN_TOKENS, max_length // SEQUENCES_PER_ROW)
    random, cache = torch.Generator().manual_seed(SEED), DynamicCache()
    ids = new_ids = torch.tensor([prompt[:prompt_length] for prompt in prompts]).repeat(
        OWN_SEQUENCES // len(prompts), 1
    )
    writer = bf16_copy(model) if uses_bf16(model) else model
    while ids.shape[1] < length:
        last = writer.model(
            input_ids=new_ids, past_key_values=cache, use_cache=True
        ).last_hidden_state[:, -1]
        new_ids = _sampled(writer.lm_head(last).float(), random)
        ids = torch.cat([ids, new_ids], 1)
        step(ids.shape[1], length)
    return torch.cat(ids.chunk(SEQUENCES_PER_ROW), 1)


def _sampled(logits: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """`torch.multinomial` would draw V random numbers per row."""
    cumulated = logits.softmax(-1).cumsum(-1)
    drawn = torch.rand(len(logits), 1, generator=random) * cumulated[:, -1:]
    return torch.searchsorted(cumulated, drawn, right=True).clamp_(max=logits.shape[1] - 1)


def uses_bf16(model: PreTrainedModel) -> bool:
    """Whether the CPU has bf16 instructions and the model is in float32: twice as fast."""
    features = torch.cpu.get_capabilities()
    return model.dtype == torch.float32 and any(features.get(name, False) for name in CPU_FEATURES)


def bf16_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with parameters in bf16."""
    # deepcopy's memo: what it has as the copy of an object is not copied again.
    memo = {
        id(weight): torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, memo)
