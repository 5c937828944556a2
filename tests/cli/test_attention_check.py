"""scripts/gpu_checks/attention.py on the CPU provider: both forms are run, compared and timed, and the advice is one
of two."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"hidden-size": 64, "intermediate-size": 96, "num-hidden-layers": 2, "num-attention-heads": 4}
SHAPE |= {"num-key-value-heads": 2, "head-dim": 16, "vocab-size": 320}
FLAGS = ["--device=cpu", "--rows=1", "--rows=5", "--capacity=64", "--capacity=128", "--rounds=2"]
FLAGS += [f"--{name}={size}" for name, size in SHAPE.items()]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def attention() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    path = ROOT / "scripts/gpu_checks/attention.py"
    spec = importlib.util.spec_from_file_location("gpu_checks.attention", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(attention: ModuleType, keep: Path, output: Path) -> dict:
    done = CliRunner().invoke(attention.main, [*FLAGS, "--keep", str(keep), "-o", str(output)])
    assert done.exit_code == 0, done.output
    report = json.loads(output.read_text())
    assert done.output.splitlines()[-1] == report["use"]
    return report


def test_both_are_timed(attention: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for faster, advice in ((1e9, "export with"), (0.0, "leave out")):
        monkeypatch.setattr(attention, "FASTER", faster)
        report = run(attention, tmp_path / "keep", tmp_path / "out.json")
        assert report["use"] == f"{advice} --cuda-attention group-query" and report["uncaptured"] == {}
        cells = [(cell["rows"], cell["capacity"]) for cell in report["cells"]]
        assert cells == [(rows, capacity) for capacity in (64, 128) for rows in (1, 5)]
        assert all(cell["group_query_milliseconds"] > 0 and cell["ratio"] > 0 for cell in report["cells"])
    monkeypatch.setattr(attention, "LIMIT", -1.0)
    report = run(attention, tmp_path / "keep", tmp_path / "out.json")
    assert report["use"].startswith("leave out --cuda-attention group-query: it computes other logits, by ")
