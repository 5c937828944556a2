"""scripts/gpu_check.sh with fakes of CUDA and TensorRT (fake_gpu_site): it runs its real steps,
each in its own process, and its report names the fault of the GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_sessions import with_engines

from conftest import export_bundle, make_model
from pass_runtime.backends.cuda import find_device

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("device", "bench tensorrt greedy", "bench tensorrt sampled")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU"
    ),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with engines for the fake TensorRT."""
    directory = tmp_path_factory.mktemp("engines")
    model = make_model(directory / "model", initializer_range=0.06)
    return with_engines(export_bundle(model, directory / "exported", lookahead=4), directory)


def check(
    bundle: Path, output: Path, *steps: str, minutes: float = 10, **faults: object
) -> tuple[int, str, Any]:
    """Run the check. Return its exit status, its verdict, and the steps of its report by name.

    steps: beginnings of the names of the steps to run. faults: as sitecustomize.py reads them.
    """
    paths = [ROOT / "tests/scripts/fake_gpu_site", *map(Path, sys.path)]
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "FAKE_GPU": json.dumps(faults),
    }
    chosen = [word for step in steps for word in ("--only", step)]
    flags = [str(bundle), "-o", str(output), "--tokens", "4", "--minutes", str(minutes)]
    done = subprocess.run(
        [ROOT / "scripts/gpu_check.sh", *flags, *chosen],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads((output / "report.json").read_text("utf-8"))
    verdict = done.stdout.splitlines()[-1]
    assert verdict == f"VERDICT: {report['verdict']} ({report['why']})", done.stderr
    assert (output / "report.md").read_text("utf-8").startswith(f"**VERDICT: {report['verdict']}**")
    return done.returncode, verdict, {step["name"]: step for step in report["steps"]}


def test_every_step_of_a_working_gpu_succeeds(engines: Path, tmp_path: Path):
    chosen = ("device", "tiny", "build", "rows", "bench")
    status, verdict, steps = check(engines, tmp_path / "out", *chosen)
    run = [name for name, step in steps.items() if step["status"] == "ok"]
    names = ["device", "tiny tensorrt", "build tensorrt", "rows tensorrt"]
    assert run == [*names, "bench tensorrt greedy", "bench tensorrt sampled"], steps
    assert status == 0
    assert verdict == f"VERDICT: works (5 steps on the GPU, {len(steps) - 6} skipped)"
    checks = {check["check"]: check["result"] for check in steps["device"]["data"]["checks"]}
    assert checks["capture"] == "replayed twice" and checks["cudaDriverGetVersion"] == "13.4"
    for plan in steps["tiny tensorrt"]["data"]["plans"]:
        assert plan["same_tokens"] and plan["captured"]
    assert len(steps["rows tensorrt"]["data"]["rows"]) == 4  # two windows have 5 rows
    assert steps["bench tensorrt greedy"]["data"]["uncaptured"] == {}
    assert "no target sm90" in steps["tiny tensorrt-rtx"]["reason"]
    assert "no CUDAExecutionProvider" in steps["tiny cuda"]["reason"]


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (0, "CUDA error 35 (35); there is no NVIDIA driver here"),
        (12040, "up to 12.4, and the library is CUDA 13.4; update to a driver for CUDA 13"),
    ],
)
def test_the_verdict_names_a_missing_or_old_driver(
    driver: int, reason: str, engines: Path, tmp_path: Path
):
    status, verdict, steps = check(engines, tmp_path / "out", driver=driver)
    assert status == 3 and verdict.startswith("VERDICT: nothing ran (no NVIDIA GPU: ")
    assert reason in verdict
    for step in steps.values():
        assert (step["status"], step["reason"]) == ("skipped", "no NVIDIA GPU")


def test_refused_captures_are_the_verdict(engines: Path, tmp_path: Path):
    chosen, faults = ("device", "rows", "bench"), {"fail_capture": "cudaStreamBeginCapture"}
    status, verdict, steps = check(engines, tmp_path / "out", *chosen, **faults)
    assert status == 4 and verdict.startswith("VERDICT: works but not captured (device: a copy: ")
    assert "901" in verdict and steps["bench tensorrt greedy"]["data"]["uncaptured"]


def test_too_little_memory_is_the_verdict(engines: Path, tmp_path: Path):
    chosen = ("device", "bench tensorrt")
    status, verdict, steps = check(engines, tmp_path / "out", *chosen, limit=1 << 18)
    assert {step["status"] for name, step in steps.items() if name in MEASURED} == {"failed"}, steps
    assert status == 1
    assert verdict.startswith("VERDICT: wrong (device failed: error: the GPU has no 1 MiB left")
    assert "--max-seq-len" in steps["bench tensorrt greedy"]["reason"]


def test_engines_of_another_version_are_the_verdict(engines: Path, tmp_path: Path):
    chosen = ("device", "bench tensorrt")
    status, verdict, _ = check(engines, tmp_path / "out", *chosen, version="10.16.0")
    assert status == 1 and "were built by version 10.15.1.fake, and 10.16.0 is installed" in verdict
    assert "run: pass-export build" in verdict


def test_a_step_that_hangs_ends_with_the_budget(engines: Path, tmp_path: Path):
    status, verdict, steps = check(engines, tmp_path / "out", "device", minutes=0.2, hangs=True)
    assert status == 3, verdict
    assert steps["device"]["status"] == "skipped"
    assert "the end of the budget" in steps["device"]["reason"]
