"""The export's check of 8-bit sums, and its limit on perplexity."""

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


def product(random: np.random.Generator) -> Product:
    codes = random.integers(-127, 128, (64, 8), np.int8)
    return Product("rows", "result", codes, 128, np.full(8, UNIT))


def test_sums_are_those_of_integers_up_to_rounding():
    random = np.random.default_rng(0)
    each, rows = product(random), random.integers(0, 256, (5, 64), np.uint8)
    exact = (rows.astype(np.int64) - 128) @ each.codes.astype(np.int64)
    assert each.is_exact(rows, (exact * UNIT).astype(np.float32))
    wrong = exact.copy()
    wrong[3, 5] += 1
    assert not each.is_exact(rows, (wrong * UNIT).astype(np.float32))
    assert not each.is_exact(rows, np.full(exact.shape, np.nan, np.float32))


def test_saturated_sums_are_found():
    """CPUs without 8-bit dot products add two products in 16 bits."""
    random = np.random.default_rng(0)
    each, rows = product(random), random.integers(200, 256, (5, 64), np.uint8)
    pairs = (rows.astype(np.int64)[:, :, None] * each.codes).reshape(5, 32, 2, 8).sum(2)
    without_offset = np.clip(pairs, -(1 << 15), (1 << 15) - 1).sum(1)
    found = without_offset - 128 * each.codes.astype(np.int64).sum(0)
    assert not each.is_exact(rows, (found * UNIT).astype(np.float32))
    found = pairs.sum(1) - 128 * each.codes.astype(np.int64).sum(0)
    assert each.is_exact(rows, (found * UNIT).astype(np.float32))


@pytest.mark.slow
def test_an_export_with_wrong_sums_fails(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The expected sums have another unit, so that all sums of the kernels seem wrong."""
    plain, compared = sums.expose_products, []

    def other_unit(graph) -> list[Product]:
        compared.extend(replace(each, scales=each.scales * 2) for each in plain(graph))
        return compared

    monkeypatch.setattr(sums, "expose_products", other_unit)
    with pytest.raises(PassError) as refused:
        export_bundle(tiny_model, tmp_path / "bundle", weights="w8a8")
    assert f"{len(compared)} of {len(compared)} 8-bit products have wrong sums on this CPU" in str(
        refused.value
    )
    assert len(compared) > 5 and not list(tmp_path.iterdir())


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
def test_an_export_above_the_limit_keeps_nothing(tiny_model: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    output = tmp_path / "bundle"
    flags = ("--model", tiny_model, "--lookahead", 1, "-o", output)
    limit = ("--max-perplexity-ratio", 0.5)
    said = error_line(command(*flags, "--verify", tmp_path / "text.txt", *limit))
    assert "perplexity is" in said and "more than 0.5 times" in said and not output.exists()
    assert "--max-perplexity-ratio is about a text: add --verify TEXT" in error_line(
        command(*flags, *limit)
    )
    assert "must be above 0" in error_line(
        command(*flags, "--verify", tmp_path / "text.txt", *limit[:1], "-1")
    )
