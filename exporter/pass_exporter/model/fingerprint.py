"""Computes the fingerprint of a base model, by which look-ahead weights find the model that they
were trained for.

A fingerprint has one element of every weight matrix, a few hundred numbers. A hash would differ
between fp32, fp16 and bf16 copies of a model. Fingerprints are compared with a tolerance for
bfloat16's rounding, so those of copies match, and those of fine-tuned models do not.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 2.0**-8, 2.0**-20
"""Both are larger than a copy's rounding: bfloat16's relative rounding error is at most 2^-9, and
the smallest numbers of float16 are 2^-24 apart."""


def model_fingerprint(model: PreTrainedModel) -> torch.Tensor:
    """Return the fingerprint, [matrices] float32: of each weight matrix, the element at half its
    rows and a third of its columns."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    return torch.stack(
        [w[w.shape[0] // 2, w.shape[1] // 3].detach().float().cpu() for w in matrices]
    )


def same_fingerprint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fingerprints are of the same model, up to its dtype."""
    return a.shape == b.shape and torch.allclose(
        a, b, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE
    )
