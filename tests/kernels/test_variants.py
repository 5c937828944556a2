"""Every set of instructions computes the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pass_runtime.backends.ort.session import find_kernels, kernels_name, library

pytestmark = pytest.mark.skipif(library() is None, reason=f"no CPU kernels: {find_kernels()}")
VARIANTS = ("avx512-vnni", "avx-vnni", "avx2", "plain")
"""A CPU that lacks one takes the next."""


@cache
def printed(variant: str) -> Any:
    program = Path(__file__).with_name("outputs.py")
    environment = os.environ | {"PASS_KERNELS_CPU": variant}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("variant", VARIANTS[:-1])
def test_variants_compute_the_same_bits(variant: str):
    expected, actual = (printed(each)["outputs"] for each in ("plain", variant))
    assert len(expected) > 100
    assert {name for name in expected if actual[name] != expected[name]} == set()


def test_the_variant_can_be_chosen():
    used = [VARIANTS.index(printed(variant)["kernels"]) for variant in VARIANTS]
    assert all(index >= place for place, index in enumerate(used)) and used == sorted(used)
    assert VARIANTS[used[0]] == kernels_name() or "PASS_KERNELS_CPU" in os.environ
    assert used[-1] == len(VARIANTS) - 1
