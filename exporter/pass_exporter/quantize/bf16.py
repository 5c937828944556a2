"""Writes calibration text in bf16 on CPUs with bf16 instructions, twice as fast as in float32. The
weights that are rounded, and the model that the exporter's check runs, keep their dtype."""

from __future__ import annotations

import copy

import torch
from transformers import PreTrainedModel

CPU_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of bf16 instruction sets of x86 and Arm CPUs. On CPUs without any, bf16 is slow."""


def uses_bf16(model: PreTrainedModel) -> bool:
    """Whether the CPU has bf16 instructions and the model is in float32."""
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
