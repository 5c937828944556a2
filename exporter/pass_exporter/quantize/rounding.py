"""Rounds weights to the codes of a scheme, and packs the codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pass_exporter.quantize.spec import MAX_SIGNED_CODE, MAX_UNSIGNED_CODE, WeightScheme

CHUNK_ELEMENTS = 1 << 17
"""Elements that fit into a core's cache."""
MAX_BLOCK_VALUE = 2.0**14
"""Larger float32 weights are not rounded in blocks: scales might exceed float16 after GPTQ."""

UnsignedCodes = tuple[npt.NDArray[np.uint8], int, npt.NDArray[np.float16], npt.NDArray[np.float16]]
"""Codes [out,in], their bits (4, 5 or 8), and the scales and offsets [out,blocks]."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out,in]: a value is (code - zero point) * scale + offset.

    data: codes of 8 bits [out,in], or of 4 bits [out,in/2] uint8, the first in the lower half.
    scales, offsets: [out,blocks] in the model's dtype, with float16's values in float32.
    zero_points: uint8 [out,blocks].
    """

    scheme: WeightScheme
    data: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    offsets: torch.Tensor | None = None

    @property
    def inputs(self) -> int:
        return int(self.data.shape[1]) * (2 if self.scheme.code_type == "int4" else 1)

    def codes(self) -> torch.Tensor:
        """Return codes [out,in]: float8, uint8 with zero points, or int8."""
        if self.scheme.code_type != "int4":
            return self.data
        pairs = torch.stack((self.data & 15, self.data >> 4), -1).flatten(1)
        # x ^ 8 - 8 extends the sign of 4 bits to 8.
        return pairs if self.scheme.zero_points else ((pairs ^ 8).to(torch.int8) - 8)

    def dequantized(self) -> torch.Tensor:
        """Return the weight [out,in] in the scales' dtype."""
        dequantized = torch.empty(len(self.data), self.inputs, dtype=self.scales.dtype)
        for rows in chunks(len(self.data), self.inputs):
            dequantized[rows] = self._dequantize(rows)
        return dequantized

    def _dequantize(self, rows: slice) -> torch.Tensor:
        part = QuantizedWeight(self.scheme, self.data[rows], self.scales[rows], None)
        values = part.codes().float().reshape(*part.scales.shape, -1)
        if self.zero_points is not None:
            values -= self.zero_points[rows, :, None].float()
        values *= part.scales[..., None].float()
        if self.offsets is not None:
            values += self.offsets[rows, :, None].float()
        dequantized: torch.Tensor = values.flatten(1).to(self.scales.dtype)
        return dequantized

    def layout(self) -> tuple[int, int, npt.NDArray[np.float16], npt.NDArray[np.float16]]:
        """Return bits (4, 5 or 8) and shift of the unsigned codes, and scales and offsets
        [out,blocks]: a value is code * scale + offset. Raises ValueError unless the weight is
        float32 in blocks."""
        if self.scheme.block_size is None or self.scales.dtype != torch.float32:
            raise ValueError("only blocks of float32 weights have unsigned codes")
        bits, shift = 4, 8
        if self.scheme.code_type != "int4":
            low, high = int(self.data.min()), int(self.data.max())
            shift = next(
                each for each in (0, 8, 16, 128) if low >= -each and (high < each or not each)
            )
            bits = 4 if high + shift < 16 else 5 if high + shift < 32 else 8
        if self.scheme.zero_points:
            shift = 0
        offsets = -(shift if self.zero_points is None else self.zero_points.float()) * self.scales
        if self.offsets is not None:
            offsets += self.offsets
        return bits, shift, self.scales.half().numpy(), offsets.half().numpy()

    def unsigned(self) -> UnsignedCodes:
        """Return the codes as the CPU's kernels take them (see `layout`)."""
        bits, shift, scales, offsets = self.layout()
        codes = self.codes().numpy().view(np.uint8)
        return (codes + np.uint8(shift) if shift else codes), bits, scales, offsets


def fits(scheme: WeightScheme, weight: torch.Tensor) -> bool:
    """Whether a weight divides into blocks, and is not too large for the scales."""
    if scheme.block_size is None:
        return True
    return weight.shape[1] % scheme.block_size == 0 and (
        weight.dtype != torch.float32 or float(weight.abs().max()) <= MAX_BLOCK_VALUE
    )


def round_to(scheme: WeightScheme, weight: torch.Tensor) -> QuantizedWeight:
    """Round `weight` [out,in], which `fits`, to the nearest codes."""
    parts = [_round(scheme, weight[rows]) for rows in chunks(*weight.shape)]
    data, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    zero_points = torch.cat([part[2] for part in parts]) if scheme.zero_points else None
    return QuantizedWeight(scheme.stored, data, scales, zero_points)


def chunks(outputs: int, inputs: int) -> list[slice]:
    """Return slices of a weight's outputs, of about CHUNK_ELEMENTS elements each."""
    step = max(1, CHUNK_ELEMENTS // inputs)
    return [slice(start, start + step) for start in range(0, outputs, step)]


def _round(
    scheme: WeightScheme, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # [out,blocks,block]
    blocks = weight.float().reshape(len(weight), -1, scheme.block_size or weight.shape[1])
    scale, zero = choose_scales(scheme, blocks, weight.dtype)
    codes = nearest(scheme, blocks, scale, zero).flatten(1)
    return pack(scheme, codes), scale[..., 0].to(weight.dtype), zero[..., 0].to(torch.uint8)


def choose_scales(
    scheme: WeightScheme,
    blocks: torch.Tensor,
    dtype: torch.dtype,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points [...,1] float32 for blocks [...,block]. importance [block]: the
    weight of each input's squared error."""
    options = [_covering(scheme, blocks, factor, dtype) for factor in scheme.shrink_factors]
    scale, zero = options[0]
    if len(options) > 1:
        least_error = torch.full_like(scale, torch.inf)
        for new_scale, new_zero in options:
            error = (
                (nearest(scheme, blocks, new_scale, new_zero) - new_zero) * new_scale - blocks
            ).square_()
            error = (
                error.sum(-1, keepdim=True)
                if importance is None
                else (error @ importance)[..., None]
            )
            better = error < least_error
            least_error = torch.where(better, error, least_error)
            scale, zero = torch.where(better, new_scale, scale), torch.where(better, new_zero, zero)
    return scale, zero


def nearest(
    scheme: WeightScheme, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor:
    """Return the nearest codes as float32. scale, zero: [...,1]."""
    codes = values / scale
    if scheme.code_type == "fp8":  # `pack` rounds these codes to floats of 8 bits.
        return codes.clamp_(-MAX_SIGNED_CODE["fp8"], MAX_SIGNED_CODE["fp8"])
    codes.round_()
    if scheme.zero_points:
        return codes.add_(zero).clamp_(0, MAX_UNSIGNED_CODE[scheme.code_type])
    return codes.clamp_(-MAX_SIGNED_CODE[scheme.code_type] - 1, MAX_SIGNED_CODE[scheme.code_type])


def _covering(
    scheme: WeightScheme, blocks: torch.Tensor, factor: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if not scheme.zero_points:
        covering = blocks.abs().amax(-1, keepdim=True) / MAX_SIGNED_CODE[scheme.code_type]
        scale = _stored(scheme, covering * factor, dtype)
        return scale, torch.zeros_like(scale)
    levels = MAX_UNSIGNED_CODE[scheme.code_type]
    # The range includes 0, so that the zero point is a code.
    low = blocks.amin(-1, keepdim=True).clamp(max=0) * factor
    high = blocks.amax(-1, keepdim=True).clamp(min=0) * factor
    scale = _stored(scheme, (high - low) / levels, dtype)
    return scale, (-low / scale).round_().clamp_(0, levels)


def _stored(scheme: WeightScheme, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scale as a bundle stores it; 1 for a block of zeros."""
    if dtype == torch.float32 and scheme.block_size is not None:
        # An offset is at most the scale times the number of codes.
        codes = MAX_UNSIGNED_CODE[scheme.code_type] + 1
        scale = scale.clamp(max=torch.finfo(torch.float16).max / codes).half()
    scale = scale.to(dtype).float()
    return torch.where(scale > 0, scale, 1)


def pack(scheme: WeightScheme, codes: torch.Tensor) -> torch.Tensor:
    """Return codes [out,in] float32 in the form of `QuantizedWeight.data`."""
    if scheme.code_type == "fp8":
        return codes.to(torch.float8_e4m3fn)
    if scheme.code_type in ("int5", "int8"):
        return codes.to(torch.uint8 if scheme.zero_points else torch.int8)
    nibbles = codes.to(torch.int8).view(torch.uint8) & 15
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)
