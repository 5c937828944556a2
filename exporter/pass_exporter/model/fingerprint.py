"""Which base model look-ahead weights belong to: one element of every weight matrix.

A hash would differ between fp32, fp16 and bf16 copies of one model; a few hundred numbers, compared within the
rounding of the coarsest of those, do not, and no other model, fine-tuned ones included, has the same.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

RELATIVE, ABSOLUTE = 2.0**-8, 2.0**-20
"""bfloat16 rounds to 2^-9 relative; float16's smallest numbers are 2^-24 apart."""


def base_sample(model: PreTrainedModel) -> torch.Tensor:
    """[matrices] float32: the element at (1/2, 1/3) of every weight matrix, in the model's own order."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    return torch.stack([w[w.shape[0] // 2, w.shape[1] // 3].detach().float().cpu() for w in matrices])


def same_base(sample: torch.Tensor, other: torch.Tensor) -> bool:
    return sample.shape == other.shape and torch.allclose(sample, other, rtol=RELATIVE, atol=ABSOLUTE)
