"""Runs calibration in bf16 on CPUs with bf16 instructions, where it is twice as fast as float32.

bf16's 8 significant bits are enough to write calibration text, to measure channel maxima and to
estimate the cost of rounding. The weights that are rounded, and the results that are checked, keep
the model's dtype.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import PreTrainedModel

CPU_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of the bf16 features of x86 and Arm CPUs. Without them bf16 is slow."""


def uses_bf16(model: PreTrainedModel) -> bool:
    """Whether the CPU has bf16 instructions and the model is in float32."""
    found = torch.cpu.get_capabilities()
    return model.dtype == torch.float32 and any(
        found.get(feature, False) for feature in CPU_FEATURES
    )


def bf16_autocast(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Within the block, the model's matrix products are in bf16 if `uses_bf16`."""
    return torch.autocast("cpu", torch.bfloat16) if uses_bf16(model) else nullcontext()


def bf16_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with parameters in bf16, for many passes: `bf16_autocast` converts in each."""
    weights = {
        id(weight): torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        for weight in model.parameters()
    }
    return copy.deepcopy(model, weights)
