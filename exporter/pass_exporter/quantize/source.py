"""`--weights source`: keeps the codes of a GGUF file, in schemes that represent the same values.

Q4_0 is code * scale: int4 with zero points of 7 or 8. Q4_1 is code * scale + minimum: int4 with
zero points and offsets (`QuantizedWeight.offsets`). Q8_0 is int8. In fp32 every value equals the
file's bit for bit; in fp16 it equals the file's value rounded to fp16. In bf16 scales and offsets
are rounded to 8 significant bits too.
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
    """Raise PassError if the weights are no .gguf file, or a tensor's type is not in GGUF_TYPES."""
    instead = "choose --weights int4 or int8"
    if not source.is_gguf:
        raise PassError(
            f"--weights source keeps the codes of a .gguf file, which {source.name} is not: "
            f"{instead}"
        )
    tensors = read_gguf(Path(source.location)).tensors
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    if other := sorted(kinds - set(GGUF_TYPES)):
        raise PassError(
            f"--weights source keeps {', '.join(GGUF_TYPES)}; {source.name} has {other[0]}: "
            f"{instead}"
        )


@torch.no_grad()
def keep_source_codes(model: PreTrainedModel, step: Step) -> dict[str, QuantizedWeight]:
    """Return the codes of all linear layers and "lm_head" by name, and set weights to their
    values."""
    modules: dict[str, torch.nn.Module] = {**linear_layers(model), "lm_head": model.lm_head}
    found: dict[str, QuantizedWeight] = {}
    with one_thread():
        for names in (*(point.readers for point in find_points(model)), ("lm_head",)):
            weights = [modules[name].get_parameter("weight").detach() for name in names]
            if INT8.fits(weights[0].shape[1]):
                for name, part in zip(names, recover_together(names, weights), strict=True):
                    found[name] = part
                    modules[name].weight = torch.nn.Parameter(
                        part.dequantized(), requires_grad=False
                    )
            step(len(found), len(modules))
    return found


def recover_together(
    names: Sequence[str], weights: Sequence[torch.Tensor]
) -> list[QuantizedWeight]:
    """Return the codes of weights [out,in] whose layers read the same tensor.

    The trunk merges such layers into one MatMul, so they get the same scheme (int8 if theirs
    differ), and all or none of them have offsets. Raises PassError if the codes of a weight are not
    found.
    """
    kept = []
    for name, weight in zip(names, weights, strict=True):
        if (found := recover(weight)) is None:
            raise PassError(
                f"--weights source cannot recover the codes of {name}: choose --weights int4 "
                "or int8"
            )
        kept.append(found)
    if len({part.scheme for part in kept}) > 1:
        kept = [_in_int8(part) for part in kept]
    if any(part.offsets is not None for part in kept):
        kept = [part if part.offsets is not None else _with_zeros(part) for part in kept]
    return kept


def _in_int8(packed: QuantizedWeight) -> QuantizedWeight:
    """Return the same values with int8 codes: each is the 4-bit code minus its zero point."""
    if packed.zero_points is None:
        return packed
    blocks = packed.codes().to(torch.int8).reshape(*packed.scales.shape, -1)
    data = (blocks - packed.zero_points[..., None].to(torch.int8)).flatten(1)
    return QuantizedWeight(INT8, data, packed.scales, None, packed.offsets)


def _with_zeros(packed: QuantizedWeight) -> QuantizedWeight:
    return replace(packed, offsets=torch.zeros_like(packed.scales))
