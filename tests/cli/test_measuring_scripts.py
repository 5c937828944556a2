"""scripts/acceptance.py measures what it says, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner
from test_gpu_check import load_script


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
