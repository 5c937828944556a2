"""scripts/host_cost.py and cost_model.py measure what they say, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from test_gpu_check import load_script


def test_host_cost(tiny_bundle: Path):
    """Trunk, tail and loop are shares of the same rounds, for every sampler, plan and batch."""
    module = load_script("host_cost")
    flags = ("--passes", "4", "--rounds", "1", "--threads", "1", "--batch", "1", "--batch", "3")
    done = CliRunner().invoke(module.main, [str(tiny_bundle), *flags])
    assert done.exit_code == 0, done.output
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["sampler", "plan", "batch", "trunk", "ms", "tail", "ms", "loop", "ms", "loop", "both"]
    assert len(lines) == len(module.SAMPLERS) * 2 * 2
    for line in lines:
        batch, trunk, tail, loop, share, both = (float(part.rstrip("%")) for part in line.split()[-6:])
        assert batch in (1, 3) and trunk > 0 and tail > 0 and loop > 0 and 0 < share < both


def test_host_cost_needs_room_for_its_passes(tiny_bundle: Path):
    module = load_script("host_cost")
    done = CliRunner().invoke(module.main, [str(tiny_bundle), "--passes", "1000", "--rounds", "1", "--batch", "1"])
    assert done.exit_code == 2 and "use fewer --passes" in done.stderr


def test_cost_model(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    module = load_script("cost_model")
    monkeypatch.setattr(module, "CAPACITIES", (256, 512))
    monkeypatch.setattr(module, "PLANS", ("ar", "two-pass", "fused:2,1,1"))
    done = CliRunner().invoke(module.main, [str(tiny_bundle), "--tokens", "8", "--rounds", "1", "--threads", "1"])
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines() if line]
    assert [row[0] for row in rows] == [
        *("rows", "---", *map(str, module.WIDTHS)),
        *("plan", "---", "ar", "two-pass", "fused:2,1,1"),
    ]
    assert rows[0] == ["rows", "S=256", "S=512"]
    for row in rows[-3:]:
        assert all(float(figure) > 0 for figure in row[1:])
