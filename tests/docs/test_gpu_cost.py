"""docs/gpu-cost.md holds what scripts/gpu_cost.py prints, and that is right by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("gpu_cost", ROOT / "scripts" / "gpu_cost.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    __import__("sys").modules["gpu_cost"] = module
    spec.loader.exec_module(module)
    return module


gpu_cost = load_script()
REST = (1024, 0.8, 0.5)


def setting(card: str, model: str, weights: str, batch: int = 1, rest: tuple[int, float, float] = REST):
    return next(
        gpu_cost.settings(
            [c for c in gpu_cost.CARDS if c.name == card],
            [m for m in gpu_cost.MODELS if m.name == model],
            [weights],
            [batch],
            rest,
        )
    )


def test_the_page_has_the_tables_of_the_script():
    """If not: put what `python scripts/gpu_cost.py --markdown` prints into docs/gpu-cost.md."""
    page = (ROOT / "docs" / "gpu-cost.md").read_text(encoding="utf-8")
    for table in gpu_cost.tables(REST, gpu_cost.DRAFTER):
        assert table in page
    printed = CliRunner().invoke(gpu_cost.main, ["--markdown"])
    assert printed.exit_code == 0 and printed.output.rstrip() == "\n\n".join(gpu_cost.tables(REST, gpu_cost.DRAFTER))


def test_by_hand():
    a100 = setting("A100", "7B", "fp16")
    # K and V of 32 layers with 32 heads of 128 numbers of 2 bytes; 6.74e9 weights of 2 bytes; 1,024 tokens and a row.
    assert a100.entry_bytes == 2 * 32 * 32 * 128 * 2
    assert a100.bytes(1) == pytest.approx(13.48e9 + 1025 * 524_288)
    assert a100.seconds(1) == pytest.approx((13.48e9 + 1025 * 524_288) / (0.8 * 2039e9))
    # 2 operations for each weight, and 4 for each number of the queries and each token.
    assert a100.row_operations == pytest.approx(13.48e9 + 4 * 32 * 32 * 128 * 1024)
    assert a100.seconds(500) == pytest.approx(500 * a100.row_operations / 156e12)
    fused = next(way for way in gpu_cost.ways(0.1) if way.name == "fused")
    assert fused.passes == ((25, 1.0),)
    assert a100.speed_up(fused, False) == pytest.approx(fused.tau[0] * a100.seconds(1) / a100.seconds(25))
    pair = next(way for way in gpu_cost.ways(0.1) if way.name == "two-pass")
    assert a100.speed_up(pair, True) == pytest.approx(pair.tau[1] * 2 * a100.seconds(1) / (2 * a100.seconds(5)))


def test_what_does_not_fit_says_so():
    rows = [gpu_cost.cells(setting("A10", "13B", weights), gpu_cost.ways(0.1)) for weights in ("int4", "fp16")]
    assert [row["plain pass, ms"] for row in rows] == [rows[0]["plain pass, ms"], "does not fit"]
    with pytest.raises(StopIteration):
        setting("A100", "7B", "fp8")  # which it does not compute in


@settings(derandomize=True, deadline=None)
@given(data=st.data())
def test_free_rows_cost_no_more_than_their_bytes(data):
    card, model = (data.draw(st.sampled_from(names)) for names in (gpu_cost.CARDS, gpu_cost.MODELS))
    weights = data.draw(st.sampled_from(["int4", "fp16"]))
    rest = (data.draw(st.integers(1, 8192)), data.draw(st.floats(0.3, 1)), data.draw(st.floats(0.3, 1)))
    found = setting(card.name, model.name, weights, data.draw(st.integers(1, 64)), rest)
    free, speed = found.free_rows(), card.bandwidth * 1e9 * rest[1]
    for rows in range(1, free + 1):
        assert found.seconds(rows) == pytest.approx(found.bytes(rows) / speed)
    assert found.seconds(free + 2) > found.bytes(free + 2) / speed


def test_a_wrong_flag_is_one_line():
    refused = CliRunner().invoke(gpu_cost.main, ["--card", "a100", "--format", "fp8"])
    assert refused.exit_code == 2 and "none of these cards computes in this format" in refused.output
