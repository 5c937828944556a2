"""scripts/host_cost.py, cost_model.py and acceptance.py measure what they say, on a tiny model."""

from __future__ import annotations

import json
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


def test_acceptance(tiny_bundle: Path, tmp_path: Path):
    """Two tables side by side; `tests/trainer/test_evaluate.py` has that their figures agree."""
    module = load_script("acceptance")
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    prompts.write_text('{"id": "a", "kind": "code", "prompt": "def add("}\n')
    figures.write_text(json.dumps({"temperatures": {"0.8": {"all": {"tau": {"two-pass": 1.234, "fused": 2.345}}}}}))
    flags = ["--prompts", prompts, "--tokens", 8, "--temperatures", "0,0.8", "--weights-figures", figures]
    done = CliRunner().invoke(module.main, [str(each) for each in (tiny_bundle, *flags)])
    assert done.exit_code == 0, done.output
    rows = [line.strip("│ ").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:2] for row in cells] == [["0", "code"], ["0", "all"], ["0.8", "code"], ["0.8", "all"]]
    assert all(1 <= float(row[2]) <= 5 and 1 <= float(row[4]) <= 5 for row in cells)
    assert [row[3] for row in cells] == ["-", "-", "-", "1.234"] and cells[3][5] == "2.345"
