"""The fingerprint of a base model, by which look-ahead weights are matched with their model.

It consists of one element of every weight matrix, a few hundred numbers. A hash would differ
between fp32, fp16 and bf16 copies of a model. Fingerprints are compared with a tolerance for
bfloat16 rounding, so copies match and fine-tuned models do not.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 2.0**-8, 2.0**-20
"""bfloat16 has a relative rounding error of 2^-9; float16's smallest numbers are 2^-24 apart."""


def model_fingerprint(model: PreTrainedModel) -> torch.Tensor:
    """Return [matrices] float32: each one's element at half its rows and a third of its columns."""
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    return torch.stack(
        [w[w.shape[0] // 2, w.shape[1] // 3].detach().float().cpu() for w in matrices]
    )


def same_fingerprint(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two fingerprints are of the same model."""
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE
    )
