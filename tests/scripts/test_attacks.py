"""scripts/attacks.py prints a row of measurements for each attack, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_attack_has_a_row_of_measurements(tiny_bundle: Path):
    pytest.importorskip("fastapi")
    command = [sys.executable, ROOT / "scripts" / "attacks.py", tiny_bundle, "--threads", "1"]
    attacks = ["1,000 chained $ref", "a prompt of 300,000 objects"]
    flags = ["--tokens", "8", "--rounds", "1", "--attack", attacks[0], "--attack", attacks[1]]
    wide = os.environ | {"COLUMNS": "200"}  # so that no row of the table is wrapped
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=240, check=False, env=wide
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in done.stdout.splitlines()
        if "│" in line
    ]
    assert [row[0] for row in rows] == attacks
    for _, answers, median, during, worst, worst_during, memory in rows:
        assert "x 400" in answers or "x 413" in answers
        assert 0 <= float(median) <= float(worst) and 0 <= float(during) <= float(worst_during)
        assert int(memory) > 0
