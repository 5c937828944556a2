"""Rounding a weight to a grid, and keeping it in the bits that it then needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pass_exporter.quantize.spec import LARGEST, LEVELS, Grid

CHUNK = 1 << 17
"""Numbers of a weight that are rounded at once: few enough for a core's cache."""


@dataclass(frozen=True)
class Packed:
    """A weight [out,in] on a grid.

    data: int8 or float8 [out,in], uint8 where there are zero points, or uint8 [out,in/2] that holds two 4-bit numbers,
    the first in the lower half. scales [out,blocks]: in the model's dtype. zero_points: uint8 [out,blocks].
    sums: so many inputs, the last ones, are not the weight's own: they read the sums of its blocks, in order (and zeros
    behind these), so that each value of a block has an offset in common with the others.
    """

    grid: Grid
    data: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    sums: int = 0

    @property
    def inputs(self) -> int:
        """Of the product, `sums` among them."""
        return int(self.data.shape[1]) * (2 if self.grid.numbers == "int4" else 1)

    def numbers(self) -> torch.Tensor:
        """[out,in]: int8, uint8 with zero points, or float8."""
        if self.grid.numbers != "int4":
            return self.data
        pairs = torch.stack((self.data & 15, self.data >> 4), -1).flatten(1)
        return pairs if self.grid.zero_points else ((pairs ^ 8).to(torch.int8) - 8)

    def restored(self) -> torch.Tensor:
        """The weight that the numbers stand for, [out,in] in the scales' dtype; in is without `sums`."""
        restored = torch.empty(len(self.data), self.inputs, dtype=self.scales.dtype)
        for rows in _chunks(len(self.data), self.inputs):
            restored[rows] = self._restore(rows)
        if not self.sums:
            return restored
        assert self.grid.block is not None
        own = self.inputs - self.sums
        offsets = restored[:, own : own + own // self.grid.block]
        return restored[:, :own] + offsets.repeat_interleave(self.grid.block, 1)

    def _restore(self, rows: slice) -> torch.Tensor:
        part = Packed(self.grid, self.data[rows], self.scales[rows], None)
        values = part.numbers().float().reshape(*part.scales.shape, -1)
        if self.zero_points is not None:
            values -= self.zero_points[rows, :, None].float()
        restored: torch.Tensor = (values * part.scales[..., None].float()).flatten(1).to(self.scales.dtype)
        return restored


def round_to(grid: Grid, weight: torch.Tensor) -> Packed:
    """weight [out,in] in any float dtype, whose inputs fill whole blocks."""
    parts = [_round(grid, weight[rows]) for rows in _chunks(*weight.shape)]
    data, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    zero_points = torch.cat([part[2] for part in parts]) if grid.zero_points else None
    return Packed(grid, data, scales, zero_points)


def _chunks(outputs: int, inputs: int) -> list[slice]:
    step = max(1, CHUNK // inputs)
    return [slice(start, start + step) for start in range(0, outputs, step)]


def _round(grid: Grid, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some rows of a weight -> data, scales, and zero points (zeros where the grid has none)."""
    blocks = weight.float().reshape(len(weight), -1, grid.block or weight.shape[1])  # [out,blocks,block]
    scale, zero = fit(grid, blocks, weight.dtype)
    numbers = nearest(grid, blocks, scale, zero).flatten(1)
    return pack(grid, numbers), scale[..., 0].to(weight.dtype), zero[..., 0].to(torch.uint8)


def fit(
    grid: Grid, blocks: torch.Tensor, dtype: torch.dtype, importance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (as `dtype` holds them) and zero points, float32 [...,1], for blocks [...,block].

    importance [block]: of each input's squared error; None: they are all alike.
    """
    tried = [_covering(grid, blocks, shrink, dtype) for shrink in grid.shrinks]
    scale, zero = tried[0]
    if len(tried) > 1:
        least = torch.full_like(scale, torch.inf)
        for other, offset in tried:
            error = ((nearest(grid, blocks, other, offset) - offset) * other - blocks).square_()
            error = error.sum(-1, keepdim=True) if importance is None else (error @ importance)[..., None]
            better = error < least
            least, scale = torch.where(better, error, least), torch.where(better, other, scale)
            zero = torch.where(better, offset, zero)
    return scale, zero


def nearest(grid: Grid, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The numbers that stand for values [...,n] best, in float32. scale, zero: [...,1]."""
    numbers = values / scale
    if grid.numbers == "fp8":
        return numbers.clamp_(-LARGEST["fp8"], LARGEST["fp8"])
    numbers.round_()
    if grid.zero_points:
        return numbers.add_(zero).clamp_(0, LEVELS[grid.numbers])
    return numbers.clamp_(-LARGEST[grid.numbers] - 1, LARGEST[grid.numbers])


def _covering(grid: Grid, blocks: torch.Tensor, shrink: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of a grid that spans `shrink` of what blocks hold."""
    if not grid.zero_points:
        scale = _stored(blocks.abs().amax(-1, keepdim=True) * (shrink / LARGEST[grid.numbers]), dtype)
        return scale, torch.zeros_like(scale)
    levels = LEVELS[grid.numbers]
    low, high = (getattr(torch, end)(blocks, -1, keepdim=True) for end in ("amin", "amax"))
    low, high = low.clamp(max=0) * shrink, high.clamp(min=0) * shrink
    scale = _stored((high - low) / levels, dtype)
    return scale, (-low / scale).round_().clamp_(0, levels)


def _stored(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the bundle will hold it; 1 for a block of zeros."""
    scale = scale.to(dtype).float()
    return torch.where(scale > 0, scale, 1)


def pack(grid: Grid, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [out,in] in float32 -> `Packed.data`."""
    if grid.numbers == "fp8":
        return numbers.to(torch.float8_e4m3fn)
    if grid.numbers == "int8":
        return numbers.to(torch.uint8 if grid.zero_points else torch.int8)
    nibbles = numbers.to(torch.int8).view(torch.uint8) & 15
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
