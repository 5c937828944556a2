"""How many bits the LM head needs."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from pass_exporter.quantize.rounding import fits, round_to
from pass_exporter.quantize.spec import INT8, WeightScheme
from pass_exporter.quantize.text import PROMPTS
from pass_exporter.threads import one_thread

MAX_DIVERGENCE = 0.01
"""By how many nats rounding the LM head may change the distribution of the next token, on average
over PROMPTS. In 5 bits it is 0.005 for Qwen2.5-Coder-0.5B, whose perplexity grows by 1 %, and 0.033
for SmolLM2-135M: 4 %."""


@torch.no_grad()
def head_scheme(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, scheme: WeightScheme
) -> WeightScheme:
    """Return `scheme` if the LM head can be rounded to it, else INT8."""
    weight = model.lm_head.weight.detach()
    if scheme == INT8 or not fits(scheme, weight):
        return INT8
    weight, divergences = weight.float(), list[torch.Tensor]()
    with one_thread():
        rounded = round_to(scheme, weight).dequantized()
    for prompt in PROMPTS:
        ids = tokenizer.backend_tokenizer.encode(prompt, add_special_tokens=False).ids
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0].float()
        exact, changed = ((hidden @ each.T).log_softmax(-1) for each in (weight, rounded))
        divergences.append((exact.exp() * (exact - changed)).sum(-1))
    return scheme if float(torch.cat(divergences).mean()) <= MAX_DIVERGENCE else INT8
