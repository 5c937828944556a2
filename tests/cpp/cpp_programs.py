"""The C++ programs that the tests of this folder run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("PASS_CPP_BUILD", ROOT / "build/cpp/release"))


def program_at(name: str) -> Path:
    """Return the path of a program. Skip the test if it was not built."""
    if not (BUILD / name).exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    return BUILD / name


def report_of(program: str, *words: object) -> Any:
    """Run a program that writes a report as JSON."""
    command = [program_at(program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def generate(
    bundle: Path, count: int, *flags: str, program: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `pass-cpp generate --json` for `count` tokens after a fixed prompt."""
    fixed = "--prompt-ids 5,6,7 --device cpu --threads 1 --json --ignore-eos --plan fused "
    fixed += f"--max-new-tokens {count}"
    command = [program or program_at("pass-cpp"), "generate", bundle, *fixed.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
