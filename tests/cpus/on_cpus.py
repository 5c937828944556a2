"""Tiny bundles of every format on CPUs that this machine does not have, emulated by qemu-user
(scripts/test.sh cpus).

Kernels of different CPUs round differently (backends/ort/kernels.py). On each of these CPUs, every
plan writes the text of plain decoding.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from emulated import PROMPT, PROMPT_TOKENS, TOKENS

from gguf_models import export_of_type
from pass_exporter.checks.sums import Product, expose_products
from pass_runtime.backends.ort.kernels import Kernels
from pass_runtime.bundle.plan import prefill_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS, PAST, cache_names

pytestmark = pytest.mark.timeout(0)
"""Emulation takes minutes, and more on a busy machine."""
ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "build/cpp/release"
CPUS = {
    # (exact_sums, least rows of int4, least rows of int8, equal_softmax)
    "Haswell": (False, 2, 1, True),  # AVX2 without 8-bit dot products
    "SandyBridge": (True, 2, 2, False),  # AVX
    "Nehalem": (True, 1, 1, False),  # SSE4.2
}
PROMPT_IDS = ",".join(map(str, PROMPT[:PROMPT_TOKENS]))
ARGUMENTS = (
    "--prompt-ids",
    PROMPT_IDS,
    "--max-new-tokens",
    TOKENS,
    "--ignore-eos",
    "--threads",
    1,
    "--json",
)
FORMATS = ("full", "int8", "int4", "source", "w8a8")


def program_at(name: str) -> Path:
    """A program of the C++ build. Skip the test if nothing was built."""
    if not (PROGRAMS / name).exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    return PROGRAMS / name


def emulated(cpu: str, *command: object) -> subprocess.CompletedProcess[str]:
    folders = [*sys.path[1:], str(ROOT / "runtime")]
    # OpenBLAS takes its kernels from these names rather than from the CPU that it finds.
    own = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment = own | {"PYTHONPATH": os.pathsep.join(folders)}
    whole = ["qemu-x86_64", "-cpu", cpu, *map(str, command)]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def bundles(
    in_format: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Copies of the bundles, by format; the tests write files in them."""
    folder = tmp_path_factory.mktemp("formats")
    source, _ = export_of_type("Q4_1", folder / "gguf")
    return {
        name: source if name == "source" else shutil.copytree(in_format(name), folder / name)
        for name in FORMATS
    }


@pytest.fixture(scope="session")
def products(bundles: dict[str, Path]) -> list[Product]:
    """The 8-bit products of the w8a8 bundle. Write sums.onnx beside its trunk, whose outputs are
    what they read and compute, and inputs for it."""
    bundle, rows = bundles["w8a8"], 9
    model, manifest = ir.load(bundle / "trunk.cpu.onnx"), read_manifest(bundle)
    found = expose_products(model.graph)
    ir.save(model, bundle / "sums.onnx")
    sizes, random = manifest.model, np.random.default_rng(0)
    cache = np.zeros((1, sizes.kv_heads, 64, sizes.head_dim), np.float32)
    plan = prefill_plan(rows)
    inputs = {
        "input_ids": random.integers(4, 200, (1, rows)),
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.zeros(1, np.int64),
        "logit_rows": plan.logit_rows,
        LOOKAHEAD_ROWS: plan.lookahead_rows,
    }
    np.savez(
        bundle / "sums.inputs.npz",
        **inputs,
        **dict.fromkeys(cache_names(PAST, sizes.layers), cache),
    )
    return found


@pytest.fixture(scope="session")
def found(bundles: dict[str, Path], products: list[Product]) -> Mapping[str, Mapping[str, Any]]:
    """What tests/cpus/emulated.py prints, by CPU and format; two CPUs run at a time."""

    def run(cpu: str) -> Mapping[str, Any]:
        results = bundles["w8a8"].with_name(f"{cpu}.npz")
        program = Path(__file__).with_name("emulated.py")
        done = emulated(cpu, Path(sys.executable).resolve(), program, results, *bundles.values())
        assert done.returncode == 0, done.stderr
        return dict(zip(bundles, json.loads(done.stdout), strict=True))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CPUS, pool.map(run, CPUS), strict=True))


@pytest.mark.parametrize("cpu", CPUS)
def test_the_kernels_of_each_cpu_are_recognized(found: Mapping[str, Mapping[str, Any]], cpu: str):
    sums, int4_rows, int8_rows, softmax = CPUS[cpu]
    rows = {
        "full": 1,
        "int8": int8_rows,
        "int4": max(int4_rows, int8_rows),
        "source": max(int4_rows, int8_rows),
    }
    for name, least_rows in rows.items():
        expected = {"exact_sums": sums, "least_rows": least_rows, "equal_softmax": softmax}
        assert found[cpu][name]["kernels"] == expected, name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_every_plan_writes_plain_decodings_text(
    found: Mapping[str, Mapping[str, Any]], cpu: str, name: str
):
    """With one slot and with three; the chunks in which a prompt is read do not matter."""
    texts = [found[cpu][name]["slots"][slots]["texts"] for slots in ("1", "3")]
    for by_plan in texts:
        for plan, written in by_plan.items():
            temperature = plan.rpartition(" ")[2]
            assert written == by_plan[f"ar at {temperature}"], plan
    for slots in ("1", "3"):
        of_slots = found[cpu][name]["slots"][slots]
        assert of_slots["same_entries"] and of_slots["chunks"], slots
        assert of_slots["cached"] == 48  # of 50 tokens, in blocks of 16


@pytest.mark.parametrize("cpu", CPUS)
def test_8_bit_sums_are_those_of_integers(
    found: Mapping[str, Mapping[str, Any]],
    bundles: dict[str, Path],
    products: list[Product],
    cpu: str,
):
    assert len(products) > 5
    with np.load(bundles["w8a8"].with_name(f"{cpu}.npz")) as results:
        assert [
            each.result
            for each in products
            if not each.is_exact(results[each.rows], results[each.result])
        ] == []


@pytest.mark.parametrize("cpu", CPUS)
def test_the_cpp_program_finds_the_same_kernels(
    found: Mapping[str, Mapping[str, Any]], bundles: dict[str, Path], cpu: str
):
    done = emulated(cpu, program_at("kernels"), *bundles.values())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(Kernels(**found[cpu][name]["kernels"])) for name in bundles
    ]


@pytest.fixture(scope="session")
def by_cpp(
    bundles: dict[str, Path],
) -> Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]]:
    """What the C++ program prints, by CPU, format and plan; two runs at a time."""
    program = program_at("pass-cpp")
    runs = [*product(CPUS, FORMATS, ("ar", "fused"))]

    def run(cpu: str, name: str, plan: str) -> subprocess.CompletedProcess[str]:
        return emulated(cpu, program, "generate", bundles[name], *ARGUMENTS, "--plan", plan)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_cpp_program_writes_the_same(
    found: Mapping[str, Mapping[str, Any]],
    by_cpp: Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]],
    cpu: str,
    name: str,
):
    for plan in ("ar", "fused"):
        done = by_cpp[cpu, name, plan]
        assert done.returncode == 0, done.stderr
        assert (
            json.loads(done.stdout)["token_ids"]
            == found[cpu][name]["slots"]["1"]["texts"][f"{plan} at 0.0"]
        ), plan
