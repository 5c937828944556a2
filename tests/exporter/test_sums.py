"""Two checks of an export: that 8-bit products are summed exactly, and the limit on perplexity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_process import command, error_line

from conftest import export_bundle
from pass_exporter.checks import sums
from pass_exporter.checks.perplexity import Quality
from pass_exporter.checks.sums import Product
from pass_runtime import PassError

UNIT = np.float32(0.0123)
"""What 1 in a sum of products of codes is in the result."""


def make_product(random: np.random.Generator) -> Product:
    """Return a product with random weights [64,8] in int8."""
    codes = random.integers(-127, 128, (64, 8), np.int8)
    return Product("rows", "result", codes, 128, np.full(8, UNIT))


def test_a_sum_that_differs_by_one_or_is_nan_is_found():
    random = np.random.default_rng(0)
    product, rows = make_product(random), random.integers(0, 256, (5, 64), np.uint8)
    exact = (rows.astype(np.int64) - 128) @ product.codes.astype(np.int64)
    assert product.is_exact(rows, (exact * UNIT).astype(np.float32))
    wrong = exact.copy()
    wrong[3, 5] += 1
    assert not product.is_exact(rows, (wrong * UNIT).astype(np.float32))
    assert not product.is_exact(rows, np.full(exact.shape, np.nan, np.float32))


def test_saturated_sums_are_found():
    """CPUs without 8-bit dot products sum pairs of products in 16 bits, too few for large codes."""
    random = np.random.default_rng(0)
    product, rows = make_product(random), random.integers(200, 256, (5, 64), np.uint8)
    pairs = (rows.astype(np.int64)[:, :, None] * product.codes).reshape(5, 32, 2, 8).sum(2)
    saturated = np.clip(pairs, -(1 << 15), (1 << 15) - 1)
    offset = 128 * product.codes.astype(np.int64).sum(0)  # of the zero point of the rows
    for terms, is_exact in ((pairs, True), (saturated, False)):
        result = ((terms.sum(1) - offset) * UNIT).astype(np.float32)
        assert product.is_exact(rows, result) == is_exact


@pytest.mark.slow
def test_an_export_with_wrong_sums_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Here all products are expected with scales twice as large, so that all sums seem wrong."""
    expose_products, products = sums.expose_products, []

    def expose_with_wrong_scales(graph) -> list[Product]:
        products.extend(replace(each, scales=each.scales * 2) for each in expose_products(graph))
        return products

    monkeypatch.setattr(sums, "expose_products", expose_with_wrong_scales)
    with pytest.raises(PassError) as refused:
        export_bundle(tiny_model, tmp_path / "bundle", weights="w8a8")
    count = len(products)
    error = f"{count} of {count} 8-bit products have wrong sums on this CPU"
    assert count > 5 and error in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("perplexity", "passes"), [(12.5, True), (12.6, False), (float("nan"), False)]
)
def test_the_limit_on_perplexity(perplexity: float, passes: bool):
    quality = Quality(255, perplexity, 10.0, 0.9)
    if passes:
        quality.check(1.25)
    else:
        with pytest.raises(
            PassError, match=r"more than 1\.25 times .* 10\.000: .* --max-perplexity-ratio"
        ):
            quality.check(1.25)


@pytest.mark.slow
def test_an_export_above_the_limit_on_perplexity_leaves_no_bundle(tiny_model: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    output = tmp_path / "bundle"
    flags = ("--model", tiny_model, "--lookahead", 1, "-o", output)
    limit = ("--max-perplexity-ratio", 0.5)
    error = error_line(command(*flags, "--verify", tmp_path / "text.txt", *limit))
    assert "perplexity is" in error and "more than 0.5 times" in error and not output.exists()
    assert "--max-perplexity-ratio is about a text: add --verify TEXT" in error_line(
        command(*flags, *limit)
    )
    assert "must be above 0" in error_line(
        command(*flags, "--verify", tmp_path / "text.txt", *limit[:1], "-1")
    )
