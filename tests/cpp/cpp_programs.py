"""The C++ programs that the tests of this folder run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("PASS_CPP_BUILD", ROOT / "build/cpp/release"))


def program_at(name: str) -> Path:
    """Skips the test where nothing was built."""
    if not (BUILD / name).exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    return BUILD / name
