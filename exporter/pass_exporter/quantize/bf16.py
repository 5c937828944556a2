"""Calibration in bf16, where the CPU multiplies it: twice as fast as float32, for half the memory traffic.

Text to calibrate on, the magnitudes of channels and the cost of rounding need no more than its 8 bits. The weights that
are rounded, and all that is checked, keep the model's dtype.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

CPU_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""Of x86 and Arm. On other CPUs products in bf16 are slower than in float32."""


def has_bf16_products(model: PreTrainedModel) -> bool:
    """Whether the CPU has products in bf16, and the model is in float32."""
    found = torch.cpu.get_capabilities()
    return model.dtype == torch.float32 and any(found.get(feature, False) for feature in CPU_FEATURES)


def bf16_products(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Within the block, the model's products are in bf16, if `has_bf16_products`."""
    return torch.autocast("cpu", torch.bfloat16) if has_bf16_products(model) else nullcontext()


def bf16_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with parameters in bf16, for many small passes, in each of which `bf16_products` would convert them."""
    weights = {id(weight): torch.nn.Parameter(weight.bfloat16(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, weights)
