"""The grid that a GGUF file has its weights on, kept where integers of ours hold the same values.

Q4_0 is number * scale: int4 with zero points 7 or 8. Q4_1 is number * scale + minimum: the same, and what the zero
point leaves of the minimum is an input of its own that reads the sum of the block (`Packed.sums`). Q8_0 is int8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gguf
import torch
from transformers import PreTrainedModel

from pass_exporter.model.adapter import linear_layers
from pass_exporter.model.registry import Source
from pass_exporter.quantize.grid import Packed, pack, round_to
from pass_exporter.quantize.sites import find_sites
from pass_exporter.quantize.spec import INT8, Grid
from pass_exporter.threads import one_thread
from pass_runtime.errors import PassError

BLOCK = 32
KINDS = ("Q4_0", "Q4_1", "Q8_0")
"""What GGUF calls the grids that are kept; all have blocks of 32."""

FREE = Grid("int4", BLOCK, zero_points=True)


def check_source(source: Source) -> None:
    """PassError where the weights are not on grids that can be kept."""
    instead = "choose --weights int4 or int8"
    if not source.is_gguf:
        raise PassError(f"--weights source keeps the grid of a .gguf file, which {source.name} is not: {instead}")
    tensors = gguf.GGUFReader(str(source.location)).tensors
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    if other := sorted(kinds - set(KINDS)):
        raise PassError(f"--weights source keeps {', '.join(KINDS)}; {source.name} has {other[0]}: {instead}")


@torch.no_grad()
def keep_grids(model: PreTrainedModel, step: Callable[[int, int], None]) -> dict[str, Packed]:
    """The linear layers as integers, by name, "lm_head" among them; the model's weights become what these stand for.

    What is on no grid of 4 bits is rounded to int8, which is what Q8_0 is on already.
    """
    modules: dict[str, torch.nn.Module] = {**linear_layers(model), "lm_head": model.lm_head}
    packed: dict[str, Packed] = {}
    with one_thread():
        for names in (*(site.readers for site in find_sites(model)), ("lm_head",)):
            weights = [modules[name].get_parameter("weight").detach() for name in names]
            if INT8.fits(weights[0].shape[1]):
                found = keep_fours(weights) or [round_to(INT8, weight) for weight in weights]
                for name, part in zip(names, found, strict=True):
                    packed[name] = part
                    modules[name].weight = torch.nn.Parameter(part.restored(), requires_grad=False)
            step(len(packed), len(modules))
    return packed


def keep_fours(weights: Sequence[torch.Tensor]) -> list[Packed] | None:
    """Weights [out,in] of layers that read the same, as they were in Q4_0 or Q4_1; None unless all were in one of them.

    (Such layers are one product in the trunk.)
    """
    kept: list[Packed] = []
    for weight in weights:
        part = _keep_four(weight)
        if part is None or (kept and part.sums != kept[0].sums):
            return None
        kept.append(part)
    return kept


def _keep_four(weight: torch.Tensor) -> Packed | None:
    blocks = weight.float().reshape(len(weight), -1, BLOCK)
    for fit in (_q4_0, _q4_1):
        if _holds(blocks[:8], fit(blocks[:8]), weight.dtype) and _holds(blocks, fit(blocks), weight.dtype):
            scale, zero, offset = fit(blocks)
            data = pack(FREE, _numbers(blocks, (scale, zero, offset)).flatten(1))
            kept = Packed(FREE, data, scale[..., 0].to(weight.dtype), zero[..., 0].to(torch.uint8))
            return kept if fit is _q4_0 else _with_offsets(kept, offset[..., 0].to(weight.dtype))
    return None


Fitted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scale, zero point and offset, float32 [out,blocks,1]: a value is (number - zero point) * scale + offset."""


def _numbers(blocks: torch.Tensor, fitted: Fitted) -> torch.Tensor:
    scale, zero, offset = fitted
    return ((blocks - offset) / scale + zero).round_().clamp_(0, 15)


def _holds(blocks: torch.Tensor, fitted: Fitted, dtype: torch.dtype) -> bool:
    """Whether the blocks are their numbers, up to rounding in `dtype`."""
    scale, zero, offset = fitted
    moved = ((_numbers(blocks, fitted) - zero) * scale + offset - blocks).abs_()
    return bool((moved <= 4 * torch.finfo(dtype).eps * blocks.abs().amax(-1, keepdim=True)).all())


def _q4_0(blocks: torch.Tensor) -> Fitted:
    """The largest magnitude of a block is 8 steps, in the direction that the seven others are not."""
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale = torch.maximum(high, -low) / 8
    zero = torch.where(-low >= high, 8.0, 7.0)
    return torch.where(scale > 0, scale, 1), zero, torch.zeros_like(scale)


def _q4_1(blocks: torch.Tensor) -> Fitted:
    """The 16 values reach from the least of a block to its largest."""
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale = (high - low) / 15
    scale = torch.where(scale > 0, scale, 1)
    zero = (-low / scale).round_().clamp_(0, 15)
    return scale, zero, low + zero * scale


def _with_offsets(kept: Packed, offsets: torch.Tensor) -> Packed:
    """offsets [out,blocks]: of the values of a block; they lie in blocks themselves, so some more of them are zeros."""
    sums = -(-offsets.shape[1] // BLOCK) * BLOCK
    more = round_to(FREE, torch.nn.functional.pad(offsets, (0, sums - offsets.shape[1])))
    assert kept.zero_points is not None and more.zero_points is not None
    data, scales = torch.cat([kept.data, more.data], 1), torch.cat([kept.scales, more.scales], 1)
    return Packed(FREE, data, scales, torch.cat([kept.zero_points, more.zero_points], 1), sums)
