"""The extras cpu and gpu each install one build of onnxruntime, and not the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pass_runtime.packages import INSTALL_GPU_BUILD, PACKAGES

ROOT = Path(__file__).parents[2]
QUIET = ("--quiet", "--disable-pip-version-check")
CONSTRAINED = (*QUIET, "--constraint", str(ROOT / "constraints.txt"))
"""Flags of pip with which it installs the versions of constraints.txt."""
PROVIDERS = "import onnxruntime; print(*onnxruntime.get_available_providers())"
OPEN_CUDA = "from pass_runtime.backends.ort.session import choose_device; choose_device('cuda')"

pytestmark = pytest.mark.slow


def pip(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        [python, "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("extras", "expected"),
    [("[cpu,serve]", {"onnxruntime"}), ("[gpu,export,serve]", {"onnxruntime-gpu"})],
)
def test_an_extra_installs_one_build_of_onnxruntime(extras, expected, tmp_path):
    """gpu brings cuBLAS and cuDNN, too."""
    report = tmp_path / "report.json"
    flags = ("--dry-run", "--ignore-installed", "--report", str(report))
    pip(Path(sys.executable), "install", *flags, *CONSTRAINED, f"{ROOT}{extras}")
    names = {
        each["metadata"]["name"].lower()
        for each in json.loads(report.read_text("utf-8"))["install"]
    }
    assert names & set(PACKAGES) == expected
    assert ({"nvidia-cublas", "nvidia-cudnn-cu13", "cuda-python"} <= names) == ("gpu" in extras)


@pytest.mark.seldom
@pytest.mark.timeout(900)
def test_an_environment_for_a_gpu_can_be_repaired(tmp_path: Path):
    """If onnxruntime is installed over onnxruntime-gpu, the error names a command that repairs
    it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin/python"

    def run_python(code: str) -> str:
        done = subprocess.run(
            [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def packages() -> list[str]:
        names = [line.split("==")[0] for line in pip(python, "freeze").splitlines()]
        return [name for name in names if name in PACKAGES]

    pip(python, "install", *CONSTRAINED, f"{ROOT}[gpu]")
    assert packages() == ["onnxruntime-gpu"] and "CUDAExecutionProvider" in run_python(PROVIDERS)
    pip(python, "install", *CONSTRAINED, "onnxruntime")
    assert len(packages()) == len(PACKAGES) and "CUDAExecutionProvider" not in run_python(PROVIDERS)
    assert f"are both installed, and share files; run: {INSTALL_GPU_BUILD}" in run_python(OPEN_CUDA)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", "-c", INSTALL_GPU_BUILD]
    subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True)
    assert packages() == ["onnxruntime-gpu"] and "CUDAExecutionProvider" in run_python(PROVIDERS)
