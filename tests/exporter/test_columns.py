"""Splitting outlier channels into columns (`pass_exporter.quantize.columns`)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_exporter.quantize.columns import ADDED_COLUMNS, SCALE_MARGIN, ColumnSplit, split_columns

SEEDS = st.integers(0, 2**32 - 1)
ROUNDING = 1e-3
"""The error, in codes, that float32 arithmetic may add to that of rounding."""


def split_rows(seed: int) -> tuple[torch.Tensor, torch.Tensor, ColumnSplit]:
    """Return a weight [32,64], rows [16,64] of which three channels are far larger than the rest,
    and the columns for both."""
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(16, 64, generator=random)
    rows[:, torch.randperm(64, generator=random)[:3]] *= 40
    weight = torch.randn(32, 64, generator=random)
    return weight, rows, split_columns(weight, rows.abs().amax(0))


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_products_over_columns_equal_those_over_channels(seed: int):
    weight, rows, columns = split_rows(seed)
    in_columns = rows[:, columns.channels] * columns.factors
    product = in_columns @ (weight * columns.divisor)[:, columns.channels].T
    assert torch.allclose(product, rows @ weight.T, rtol=1e-4, atol=1e-3)
    assert len(columns.channels) == 64 + ADDED_COLUMNS and columns.copies.min() >= 1


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_errors_are_at_most_half_a_code_up_to_the_margin(seed: int):
    """A code is that of the columns, smaller than one that covers the largest channel. The scale
    covers the measured maxima times SCALE_MARGIN; larger values are clipped."""
    _, rows, columns = split_rows(seed)
    limit = columns.scale * columns.divisor * (0.5 + ROUNDING)
    for factor, fits in ((1, True), (SCALE_MARGIN, True), (4, False)):
        values = factor * rows
        errors = (columns.dequantized(columns.codes(values)) - values).abs()
        assert bool((errors <= limit).all()) == fits
        assert fits or float(errors.max()) > 1


@settings(max_examples=25, deadline=None)
@given(SEEDS)
def test_columns_make_products_more_exact(seed: int):
    weight, rows, columns = split_rows(seed)
    scale = rows.abs().max() * SCALE_MARGIN / 127
    plain = (rows / scale).round() * scale
    split = columns.dequantized(columns.codes(rows))
    split_error, plain_error = (
        (rounded @ weight.T - rows @ weight.T).square().mean() for rounded in (split, plain)
    )
    assert split_error < plain_error / 10
