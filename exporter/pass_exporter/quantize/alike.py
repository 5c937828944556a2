"""Gives the codes of several weights one scheme, without changing the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pass_exporter.quantize.rounding import QuantizedWeight, pack
from pass_exporter.quantize.spec import INT8, MAX_UNSIGNED_CODE


def alike(parts: Sequence[QuantizedWeight]) -> list[QuantizedWeight]:
    """Return the weights with the same type of codes: 8 bits, zero points and offsets, if one of
    them needs them, are given to all."""
    types = {part.scheme.code_type for part in parts}
    made = [_in_int8(part) for part in parts] if types == {"int4", "int8"} else list(parts)
    if any(part.scheme.zero_points for part in made):
        made = [_with_zero_points(part) for part in made]
    if any(part.offsets is not None for part in made):
        made = [_with_offsets(part) for part in made]
    # Factors to shrink scales by say nothing about codes.
    return [replace(part, scheme=made[0].scheme) for part in made]


def _in_int8(part: QuantizedWeight) -> QuantizedWeight:
    """Return 4-bit codes as signed 8-bit codes, without zero points."""
    if part.scheme.code_type == "int8":
        return part
    codes = part.codes().to(torch.int8).reshape(*part.scales.shape, -1)
    if part.zero_points is not None:
        codes = codes - part.zero_points[..., None].to(torch.int8)
    return QuantizedWeight(INT8, codes.flatten(1), part.scales, None, part.offsets)


def _with_zero_points(part: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with unsigned codes."""
    if part.scheme.zero_points:
        return part
    scheme = replace(part.scheme, zero_points=True)
    middle = (MAX_UNSIGNED_CODE[scheme.code_type] + 1) // 2
    zero_points = torch.full_like(part.scales, middle, dtype=torch.uint8)
    data = pack(scheme, part.codes().to(torch.int16) + middle)
    return QuantizedWeight(scheme, data, part.scales, zero_points, part.offsets)


def _with_offsets(part: QuantizedWeight) -> QuantizedWeight:
    """Return the weight with offsets of 0 if it has none."""
    if part.offsets is not None:
        return part
    return replace(part, offsets=torch.zeros_like(part.scales))
