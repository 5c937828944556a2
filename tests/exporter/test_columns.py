"""Splitting large channels into columns (`pass_exporter.quantize.columns`)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_exporter.quantize.columns import ADDED_COLUMNS, SCALE_MARGIN, ColumnSplit, split_columns

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 1e-3
"""Codes that float32 arithmetic may add to an error of half a code."""


def split_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, ColumnSplit]:
    """A weight [32,64], rows [16,64] of which three channels are far larger than the rest, and
    their columns."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(16, 64, generator=random)
    rows[:, torch.randperm(64, generator=random)[:3]] *= 40
    weight = torch.randn(32, 64, generator=random)
    return weight, rows, split_columns(weight, rows.abs().amax(0))


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_products_over_columns_equal_those_over_channels(seed: int):
    weight, rows, columns = split_rows(seed)
    read = rows[:, columns.channels] * columns.factors
    product = read @ (weight * columns.divisor)[:, columns.channels].T
    assert torch.allclose(product, rows @ weight.T, rtol=1e-4, atol=1e-3)
    assert len(columns.channels) == 64 + ADDED_COLUMNS and columns.copies.min() >= 1


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_errors_are_at_most_half_a_code(seed: int):
    """Without columns, it would be half a code for the largest channel."""
    _, rows, columns = split_rows(seed)
    limit = columns.scale * columns.divisor * (0.5 + ROUNDING)
    assert bool(((columns.dequantized(columns.codes(rows)) - rows).abs() <= limit).all())


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_columns_make_products_more_exact(seed: int):
    weight, rows, columns = split_rows(seed)
    scale = rows.abs().max() * SCALE_MARGIN / 127
    plain = (rows / scale).round() * scale
    read = columns.dequantized(columns.codes(rows))
    errors = [(each @ weight.T - rows @ weight.T).square().mean() for each in (read, plain)]
    assert errors[0] < errors[1] / 10


def test_values_up_to_the_margin_above_the_measured_ones_are_not_clipped():
    _, rows, columns = split_rows(0)
    limit = columns.scale * columns.divisor * (0.5 + ROUNDING)
    larger = rows * SCALE_MARGIN
    assert bool(((columns.dequantized(columns.codes(larger)) - larger).abs() <= limit).all())
    assert float((columns.dequantized(columns.codes(rows * 4)) - rows * 4).abs().max()) > 1
