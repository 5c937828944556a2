"""The memory that an export needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from export_process import process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tiny_bundle: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "random"
    sizes = "--layers 12 --hidden 1024 --intermediate 4096 --heads 16 --vocab 32000"
    script = [sys.executable, ROOT / "scripts" / "random_llama.py"]
    command = [*script, directory, "--tokenizer", tiny_bundle, *sizes.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return directory


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_export_needs_at_most_1_5_times_the_weights_and_a_gigabyte(model: Path, tmp_path: Path):
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 1e9
    assert size > 0.4
    flags = ("--dtype", "fp16", "--lookahead", "2", "-o", tmp_path / "bundle")
    done = process("--model", model, *flags)
    assert done.returncode == 0, done.stderr
    peak = re.search(r"peak memory +([0-9.]+) GB", done.stderr)
    assert peak is not None and float(peak[1]) <= 1.5 * size + 1, (peak, size)
