"""The C++ programs that the tests of this folder run, and the script that writes their scenes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("PASS_CPP_BUILD", ROOT / "build/cpp/release"))


def program_at(name: str) -> Path:
    """Return the path of a program. Skips the test if nothing was built."""
    if not (BUILD / name).exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    return BUILD / name


def generate(bundle: Path, count: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run `pass-cpp generate` with a fixed prompt for `count` tokens, as JSON."""
    fixed = "--prompt-ids 5,6,7 --device cpu --threads 1 --json --ignore-eos --plan fused "
    fixed += f"--max-new-tokens {count}"
    command = [program_at("pass-cpp"), "generate", bundle, *fixed.split(), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def golden_traces() -> ModuleType:
    """Return golden_traces.py of this folder as a module."""
    spec = importlib.util.spec_from_file_location(
        "golden_traces", Path(__file__).with_name("golden_traces.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
