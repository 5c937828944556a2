"""Quantizes for `--weights source`, which keeps the codes of a GGUF file.

Each GGUF type has a scheme that represents the same values. Q4_0 (code * scale) becomes int4 with
zero points of 7 or 8, Q4_1 (code * scale + minimum) int4 with zero points and
`QuantizedWeight.offsets`, and Q8_0 becomes int8. In fp32 every value equals the file's bit for bit;
in fp16 it equals the file's value rounded to fp16. In bf16 scales and offsets are rounded too, to 8
significant bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.model.gguf_reader import read_gguf
from pass_exporter.model.registry import ModelSource
from pass_exporter.progress import Step
from pass_exporter.quantize.points import find_points
from pass_exporter.quantize.recover import recover
from pass_exporter.quantize.rounding import QuantizedWeight
from pass_exporter.quantize.spec import INT8
from pass_exporter.threads import one_thread
from pass_runtime.errors import PassError

GGUF_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""The GGUF tensor types whose codes can be kept. All have blocks of 32 values."""


def check_gguf_types(source: ModelSource) -> None:
    """Raise PassError if the model is no .gguf file, or a matrix's type is not in GGUF_TYPES."""
    instead = "choose --weights int4 or int8"
    if not source.is_gguf:
        raise PassError(
            f"--weights source keeps the codes of a .gguf file, which {source.name} is not: "
            f"{instead}"
        )
    tensors = read_gguf(Path(source.location)).tensors
    types = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    if other_types := sorted(types - set(GGUF_TYPES)):
        raise PassError(
            f"--weights source keeps {', '.join(GGUF_TYPES)}; {source.name} has {other_types[0]}: "
            f"{instead}"
        )


@torch.no_grad()
def keep_source_codes(model: PreTrainedModel, step: Step) -> dict[str, QuantizedWeight]:
    """Return the codes by layer ("lm_head" too), and set the weights to the values of the codes.

    Layers whose number of inputs is not a multiple of the block size keep their weights.
    """
    modules: dict[str, torch.nn.Module] = {**linear_layers(model), "lm_head": model.lm_head}
    kept: dict[str, QuantizedWeight] = {}
    with one_thread():
        for names in (*(point.readers for point in find_points(model)), ("lm_head",)):
            weights = [modules[name].get_parameter("weight").detach() for name in names]
            if INT8.fits(weights[0].shape[1]):
                for name, weight in zip(names, recover_together(names, weights), strict=True):
                    kept[name] = weight
                    modules[name].weight = torch.nn.Parameter(
                        weight.dequantized(), requires_grad=False
                    )
            step(len(kept), len(modules))
    return kept


def recover_together(
    names: Sequence[str], weights: Sequence[torch.Tensor]
) -> list[QuantizedWeight]:
    """Return the codes of weights [out,in] whose layers read the same tensor.

    The trunk merges such layers into one MatMul, so all get the same scheme (int8 if the recovered
    schemes differ), and all or none have offsets. Raises PassError if `recover` finds no codes.
    """
    recovered = []
    for name, weight in zip(names, weights, strict=True):
        if (codes := recover(weight)) is None:
            raise PassError(
                f"--weights source cannot recover the codes of {name}: choose --weights int4 "
                "or int8"
            )
        recovered.append(codes)
    if len({each.scheme for each in recovered}) > 1:
        recovered = [_in_int8(each) for each in recovered]
    if any(each.offsets is not None for each in recovered):
        recovered = [_with_offsets(each) for each in recovered]
    return recovered


def _in_int8(packed: QuantizedWeight) -> QuantizedWeight:
    """Return the same values with int8 codes, which are the 4-bit codes minus their zero points."""
    if packed.zero_points is None:
        return packed
    blocks = packed.codes().to(torch.int8).reshape(*packed.scales.shape, -1)
    data = (blocks - packed.zero_points[..., None].to(torch.int8)).flatten(1)
    return QuantizedWeight(INT8, data, packed.scales, None, packed.offsets)


def _with_offsets(packed: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with offsets of 0 if it has none."""
    if packed.offsets is not None:
        return packed
    return replace(packed, offsets=torch.zeros_like(packed.scales))
