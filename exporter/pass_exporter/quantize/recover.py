"""Recovers the codes, scales and offsets of GGUF's Q4_0, Q4_1 and Q8_0 from the dequantized values.

A loaded model has the values only. A value is an integer code times its block's scale, which the
file holds in float16; Q4_1 adds the block's minimum. For each block several scales are tried, the
likeliest first, until one reproduces all values (within TOLERANCES).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from pass_exporter.quantize.rounding import QuantizedWeight, chunks, pack
from pass_exporter.quantize.spec import INT8, MAX_UNSIGNED_CODE, WeightScheme

BLOCK_SIZE = 32
UINT4 = WeightScheme("int4", BLOCK_SIZE, zero_points=True)
PROBE_OUTPUTS = 8
"""A format is tried on this many outputs of a weight, before it is tried on all."""
TOLERANCES = {torch.float32: (0.0,), torch.float16: (0.0, 2**-10), torch.bfloat16: (2**-6,)}
"""By the model's dtype, the errors to accept, relative to the largest value of the block, tried in
turn. fp32 holds the file's values. fp16 rounds them, sometimes to a value that no float16 scale
gives. bf16 has fewer bits than the file's scales."""

Fit = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scale, zero, offset of blocks, float32 [blocks,1]: a value is (code - zero) * scale + offset."""
Guess = Callable[[torch.Tensor], Fit]
"""Computes the Fit of blocks [blocks,BLOCK_SIZE] if a certain quantizer made them."""


@dataclass(frozen=True)
class _Format:
    """A GGUF tensor type, with the scheme for its codes, and its guesses, the likeliest first."""

    scheme: WeightScheme
    guesses: Callable[[], Iterator[Guess]]
    has_offsets: bool = False


def recover(weight: torch.Tensor) -> QuantizedWeight | None:
    """Return the codes of a weight [out,in] by the first of FORMATS that fits, or None."""
    for form in FORMATS:
        if _solve(form, weight[:PROBE_OUTPUTS]) is None:
            continue
        parts = []
        for outputs in chunks(*weight.shape):
            part = _solve(form, weight[outputs])
            if part is None:
                break
            parts.append(part)
        else:
            return _joined(parts)
    return None


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    zero_points = [part.zero_points for part in parts if part.zero_points is not None]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return QuantizedWeight(
        parts[0].scheme,
        torch.cat([part.data for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zero_points) if zero_points else None,
        torch.cat(offsets) if offsets else None,
    )


def _solve(form: _Format, weight: torch.Tensor) -> QuantizedWeight | None:
    """Return the codes of some outputs of a weight; None if a block fits no guess."""
    scheme, blocks = form.scheme, weight.float().reshape(-1, BLOCK_SIZE)
    # A block with more distinct values than there are 4-bit codes needs no guesses.
    if (
        scheme.code_type == "int4"
        and _max_distinct(blocks[: PROBE_OUTPUTS * BLOCK_SIZE]) > MAX_UNSIGNED_CODE["int4"] + 1
    ):
        return None
    min_code, max_code = (0, MAX_UNSIGNED_CODE["int4"]) if scheme.zero_points else (-128, 127)
    # The blocks that no guess has solved, and their indices.
    unsolved, indices, solution = blocks, torch.arange(len(blocks)), None
    for tolerance, guess in (
        (tolerance, guess) for tolerance in TOLERANCES[weight.dtype] for guess in form.guesses()
    ):
        scale, zero, offset = guess(unsolved)
        scale, offset = _in_dtype(scale, weight.dtype), _in_dtype(offset, weight.dtype)
        codes = (unsolved - offset).div_(scale).add_(zero).round_().clamp_(min_code, max_code)
        error = _in_dtype((codes - zero) * scale + offset, weight.dtype).sub_(unsolved).abs_()
        is_solved = error.amax(-1) <= tolerance * unsolved.abs().amax(-1)
        if solution is None:  # Most blocks are solved; later guesses replace the others' values.
            solution = [codes, scale, zero, offset]
        else:
            for part, values in zip(solution, (codes, scale, zero, offset), strict=True):
                part[indices[is_solved]] = values[is_solved]
        if is_solved.all():
            return _packed(form, solution, weight)
        indices = indices[~is_solved]
        unsolved = blocks[indices]
    return None


def _packed(form: _Format, solution: list[torch.Tensor], weight: torch.Tensor) -> QuantizedWeight:
    """Return the codes of a weight. solution: the codes, scale, zero and offset of its blocks."""
    codes, *by_block = solution
    scales, zero, offsets = (part.reshape(len(weight), -1) for part in by_block)
    return QuantizedWeight(
        form.scheme,
        pack(form.scheme, codes.reshape(weight.shape)),
        scales.to(weight.dtype),
        zero.to(torch.uint8) if form.scheme.zero_points else None,
        offsets.to(weight.dtype) if form.has_offsets else None,
    )


def _in_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return values.to(dtype).float()


def _max_distinct(blocks: torch.Tensor) -> int:
    """Return the largest number of distinct values in any of the blocks."""
    ordered = blocks.sort(-1).values
    return 1 + int((ordered[:, 1:] != ordered[:, :-1]).sum(-1).max())


def _scale(size: torch.Tensor, steps: int, nudge: int) -> torch.Tensor:
    """Return size / steps in float16, `nudge` representable values up; 1 for blocks of zeros."""
    scale = (size / steps).half()
    scale = (scale.view(torch.int16) + nudge).view(torch.float16).float()
    return torch.where((size > 0) & (scale > 0), scale, 1)


NUDGES = (0, 1, -1, 2, -2)
"""A quantizer's rounding may have moved a scale by so many representable float16 values."""


def _q4_0() -> Iterator[Guess]:
    """Return guesses for Q4_0: the largest magnitude is 8 steps from 0, on the side with 8 codes.

    A quantizer may have chosen a larger scale, so fewer steps are tried as well.
    """

    def guess(steps: int, nudge: int, blocks: torch.Tensor) -> Fit:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        zero = torch.where(-low >= high, 8.0, 7.0)
        return _scale(torch.maximum(high, -low), steps, nudge), zero, torch.zeros_like(low)

    return (partial(guess, steps, nudge) for steps, nudge in product(range(8, 0, -1), NUDGES))


def _q8_0() -> Iterator[Guess]:
    """Return guesses for Q8_0: the largest magnitude is 127 steps from 0, or 128, or fewer."""

    def guess(steps: int, nudge: int, blocks: torch.Tensor) -> Fit:
        scale = _scale(blocks.abs().amax(-1, keepdim=True), steps, nudge)
        return scale, torch.zeros_like(scale), torch.zeros_like(scale)

    return (
        partial(guess, steps, nudge)
        for steps, nudge in product((127, 128, *range(126, 0, -1)), NUDGES)
    )


def _q4_1() -> Iterator[Guess]:
    """Return guesses for Q4_1: the least and the largest value have codes 0 and 15, or other codes.

    Each pair of codes is tried with the zero point that makes the offset small, and with zero point
    0: a small offset, which is a difference of larger numbers, may be inexact.
    """

    def guess(first: int, last: int, nudge: int, small_offset: bool, blocks: torch.Tensor) -> Fit:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        scale = _scale(high - low, last - first, nudge)
        minimum = torch.where(high > low, (low - first * scale).half().float(), low)
        zero = torch.zeros_like(scale)
        if small_offset:
            zero = (-minimum / scale).round_().clamp_(0, 15)
        return scale, zero, minimum + zero * scale

    pairs = [(first, last) for first in range(16) for last in range(first + 1, 16)]
    pairs.sort(key=lambda pair: pair[0] - pair[1])  # the largest difference first
    return (
        partial(guess, first, last, nudge, small_offset)
        for (first, last), nudge, small_offset in product(pairs, NUDGES, (True, False))
    )


FORMATS = (_Format(UINT4, _q4_0), _Format(UINT4, _q4_1, has_offsets=True), _Format(INT8, _q8_0))
