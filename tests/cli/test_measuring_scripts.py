"""Scripts measure what they say, on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_step_time import ROOT, load_script


def test_acceptance(tiny_bundle: Path, tmp_path: Path):
    """Two tables side by side; `tests/trainer/test_evaluate.py` has that their figures agree."""
    module = load_script("acceptance")
    prompts, figures = tmp_path / "prompts.jsonl", tmp_path / "figures.json"
    lines = (
        '{"id": "a", "kind": "code", "prompt": "def add("}',
        '{"id": "b", "kind": "mail", "prompt": "write to him"}',
    )
    prompts.write_text("\n".join(lines) + "\n")
    figures.write_text(json.dumps({"temperatures": {"0.8": {"all": {"tau": {"two-pass": 1.234, "fused": 2.345}}}}}))
    flags = ["--prompts", prompts, "--tokens", 8, "--temperatures", "0,0.8", "--weights-figures", figures]
    done = CliRunner().invoke(module.main, [str(each) for each in (tiny_bundle, *flags)])
    assert done.exit_code == 0, done.output
    rows = [line.strip("│ ").split("│") for line in done.stdout.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [row[:2] for row in cells] == [["0", "code"], ["0", "all"], ["0.8", "code"], ["0.8", "all"]]
    assert all(1 <= float(row[2]) <= 5 and 1 <= float(row[4]) <= 5 for row in cells)
    assert [row[3] for row in cells] == ["-", "-", "-", "1.234"] and cells[3][5] == "2.345"
    done = CliRunner().invoke(module.main, [str(each) for each in (tiny_bundle, *flags, "--kinds", "mail")])
    assert "mail" in done.stdout and "code" not in done.stdout


def test_load_cost(tiny_bundle: Path):
    """Every way of opening has its row; several processes are measured where that is another figure."""
    command = [sys.executable, ROOT / "scripts" / "load_cost.py", tiny_bundle]
    flags = ("--rounds", "1", "--processes", "2", "--threads", "1")
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == [
        f"{tiny_bundle.name}, {when}" for when in ("without", "the first time", "the second time", "later")
    ]
    for name, opened, first, pss, anonymous, *together in rows:
        assert 0 < float(opened) <= float(first) and 0 < int(anonymous) <= int(pss), name
        assert [bool(size) for size in together] == 2 * [name.endswith(("without", "later"))]


def test_host_time(tiny_bundle: Path, tmp_path: Path):
    module = load_script("host_time")
    flags = ["--tokens", 16, "--rounds", 1, "--batch", 1, "--batch", 2, "-o", tmp_path / "out.json"]
    done = CliRunner().invoke(module.main, [str(each) for each in (tiny_bundle, *flags)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out.json").read_text())["host_us"]
    assert set(found) == set(module.KINDS) and all(name in done.stdout for name in found)
    assert all(set(by_batch) == {"1", "2"} and min(by_batch.values()) > 0 for by_batch in found.values())


def test_attacks(tiny_bundle: Path):
    """Each attack has a row, with how the server answered it."""
    pytest.importorskip("fastapi")
    command = [sys.executable, ROOT / "scripts" / "attacks.py", tiny_bundle, "--threads", "1"]
    attacks = ["1,000 chained $ref", "a prompt of 300,000 objects"]
    flags = ["--tokens", "8", "--rounds", "1", "--attack", attacks[0], "--attack", attacks[1]]
    wide = os.environ | {"COLUMNS": "200"}
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == attacks
    for _, answers, median, beside, worst, worst_beside, memory in rows:
        assert "x 400" in answers or "x 413" in answers
        assert 0 <= float(median) <= float(worst) and 0 <= float(beside) <= float(worst_beside)
        assert int(memory) > 0


def test_clients_speed(tiny_bundle: Path, tmp_path: Path):
    module = load_script("clients_speed")
    flags = ["--clients", 1, "--clients", 3, "--requests", 3, "--tokens", 8, "--rounds", 2, "--threads", 1]
    done = CliRunner().invoke(module.main, [str(each) for each in (tiny_bundle, *flags, "-o", tmp_path / "out.json")])
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["temperature"], run["clients"]) for run in runs] == [(0, 1), (0, 3), (0.8, 1), (0.8, 3)]
    for run in runs:
        assert run["ratios"] == [on / off for on, off in zip(run["on"], run["off"], strict=True)]
        assert len(run["ratios"]) == 2 and min(run["off"]) > 0
