"""The fingerprint of a base model, which tells what model look-ahead weights belong to.

It has one element of every weight matrix. A hash would differ between fp32, fp16 and bf16 copies of one model. These
few hundred numbers are compared within the rounding error of bfloat16: copies are equal, and a fine-tuned model is not.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

RELATIVE, ABSOLUTE = 2.0**-8, 2.0**-20
"""Tolerances: bfloat16 has a relative rounding error of 2^-9; float16's smallest numbers are 2^-24 apart."""


def base_sample(model: PreTrainedModel) -> torch.Tensor:
    """Return [matrices] float32: the element of every weight matrix at half its rows and a third of its columns."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    return torch.stack([w[w.shape[0] // 2, w.shape[1] // 3].detach().float().cpu() for w in matrices])


def same_base(sample: torch.Tensor, other: torch.Tensor) -> bool:
    return sample.shape == other.shape and torch.allclose(sample, other, rtol=RELATIVE, atol=ABSOLUTE)
