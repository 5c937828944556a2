"""Recovers the codes, scales and offsets of GGUF's Q4_0, Q4_1 and Q8_0 from the dequantized values.

A value is an integer code times a scale, which the file holds in float16; Q4_1 adds the block's
minimum. For each block several scales are tried, the likeliest first, until one reproduces all
values (within TOLERANCES).
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
"""Outputs of a weight that are tried first. A format must fit them first."""
TOLERANCES = {torch.float32: (0.0,), torch.float16: (0.0, 2**-10), torch.bfloat16: (2**-6,)}
"""By the model's dtype, the accepted errors of a value relative to the largest of its block, tried
in turn. fp32 holds the file's values. fp16 rounds them, sometimes to a value that no float16 scale
gives. bf16 has fewer bits than the file's scales."""

Fitted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scale, zero, offset, float32 [blocks,1]: a value is (code - zero) * scale + offset."""
Guess = Callable[[torch.Tensor], Fitted]
"""Computes parameters for blocks [blocks,BLOCK_SIZE] by one guess of how scales were chosen."""


@dataclass(frozen=True)
class _Format:
    """A GGUF format: the scheme for its codes, and the guesses to try, the likeliest first."""

    scheme: WeightScheme
    guesses: Callable[[], Iterator[Guess]]
    has_offsets: bool = False


def recover(weight: torch.Tensor) -> QuantizedWeight | None:
    """Return the codes of a weight [out,in] that comes from one of FORMATS; None if none fits."""
    for form in FORMATS:
        if _solve(form, weight[:PROBE_OUTPUTS]) is None:
            continue
        found = []
        for outputs in chunks(*weight.shape):
            part = _solve(form, weight[outputs])
            if part is None:
                break
            found.append(part)
        else:
            return _joined(found)
    return None


def _joined(parts: list[QuantizedWeight]) -> QuantizedWeight:
    def joined(name: str) -> torch.Tensor | None:
        return (
            None
            if getattr(parts[0], name) is None
            else torch.cat([getattr(part, name) for part in parts])
        )

    data, scales = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("data", "scales")
    )
    return QuantizedWeight(parts[0].scheme, data, scales, joined("zero_points"), joined("offsets"))


def _solve(form: _Format, weight: torch.Tensor) -> QuantizedWeight | None:
    """Return the codes of some outputs of a weight; None if a block fits no guess."""
    scheme, blocks = form.scheme, weight.float().reshape(-1, BLOCK_SIZE)
    if (
        scheme.code_type == "int4"
        and _max_distinct(blocks[: PROBE_OUTPUTS * BLOCK_SIZE]) > MAX_UNSIGNED_CODE["int4"] + 1
    ):
        return None
    unsolved, rest, answer = torch.arange(len(blocks)), blocks, None  # rest: the blocks `unsolved`
    for tolerance, guess in (
        (tolerance, guess) for tolerance in TOLERANCES[weight.dtype] for guess in form.guesses()
    ):
        scale, zero, offset = guess(rest)
        scale, offset = _in_dtype(scale, weight.dtype), _in_dtype(offset, weight.dtype)
        least, most = (0, MAX_UNSIGNED_CODE["int4"]) if scheme.zero_points else (-128, 127)
        codes = (rest - offset).div_(scale).add_(zero).round_().clamp_(least, most)
        error = _in_dtype((codes - zero) * scale + offset, weight.dtype).sub_(rest).abs_()
        solved = (
            error.amax(-1, keepdim=True) <= tolerance * rest.abs().amax(-1, keepdim=True)
        ).flatten()
        if answer is None:
            answer = [codes, scale, zero, offset]  # The first guess solves most blocks.
        else:
            for part, values in zip(answer, (codes, scale, zero, offset), strict=True):
                part[unsolved[solved]] = values[solved]
        if solved.all():
            return _packed(form, answer, weight)
        unsolved = unsolved[~solved]
        rest = blocks[unsolved]
    return None


def _packed(form: _Format, answer: list[torch.Tensor], weight: torch.Tensor) -> QuantizedWeight:
    codes, *by_block = answer
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
    """`size` divided by `steps`, moved by `nudge` float16 values; 1 for a block of zeros."""
    scale = (size / steps).half()
    scale = (scale.view(torch.int16) + nudge).view(torch.float16).float()
    return torch.where((size > 0) & (scale > 0), scale, 1)


NUDGES = (0, 1, -1, 2, -2)
"""A quantizer's rounding may move its scale by so many float16 values."""


def _q4_0() -> Iterator[Guess]:
    """Guesses for Q4_0: the largest magnitude is 8 steps. Its side of 0 has 8 codes.

    A quantizer may have chosen a larger scale, so fewer steps are tried as well.
    """

    def guess(steps: int, nudge: int, blocks: torch.Tensor) -> Fitted:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        zero = torch.where(-low >= high, 8.0, 7.0)
        return _scale(torch.maximum(high, -low), steps, nudge), zero, torch.zeros_like(low)

    return (partial(guess, steps, nudge) for steps, nudge in product(range(8, 0, -1), NUDGES))


def _q8_0() -> Iterator[Guess]:
    """Guesses for Q8_0: the largest magnitude is 127 steps, or another number."""

    def guess(steps: int, nudge: int, blocks: torch.Tensor) -> Fitted:
        scale = _scale(blocks.abs().amax(-1, keepdim=True), steps, nudge)
        return scale, torch.zeros_like(scale), torch.zeros_like(scale)

    return (
        partial(guess, steps, nudge)
        for steps, nudge in product((127, 128, *range(126, 0, -1)), NUDGES)
    )


def _q4_1() -> Iterator[Guess]:
    """Guesses for Q4_1: the least and the largest value have codes 0 and 15, or another pair.

    Each is tried with the zero point that makes the offset small, and with zero point 0: a small
    offset may be inexact.
    """

    def guess(first: int, last: int, nudge: int, centred: bool, blocks: torch.Tensor) -> Fitted:
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        scale = _scale(high - low, last - first, nudge)
        minimum = torch.where(high > low, (low - first * scale).half().float(), low)
        zero = (-minimum / scale).round_().clamp_(0, 15) if centred else torch.zeros_like(scale)
        return scale, zero, minimum + zero * scale

    ends = sorted(
        ((i, j) for i in range(16) for j in range(i + 1, 16)), key=lambda pair: pair[0] - pair[1]
    )
    tries = product(ends, NUDGES, (True, False))
    return (partial(guess, first, last, nudge, centred) for (first, last), nudge, centred in tries)


FORMATS = (_Format(UINT4, _q4_0), _Format(UINT4, _q4_1, has_offsets=True), _Format(INT8, _q8_0))
