"""Tiny bundles of every format on other CPUs, which qemu-user emulates (scripts/test.sh cpus).

ONNX Runtime's kernels for different CPUs round differently (backends/ort/kernels.py). On each of
these CPUs, every plan must write the text of plain decoding.
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
    # qemu's name: (exact_sums, least_rows of int4, least_rows of int8, equal_softmax), as Kernels
    # defines them
    "Haswell": (False, 2, 1, True),  # AVX2 without 8-bit dot products
    "SandyBridge": (True, 2, 2, False),  # AVX
    "Nehalem": (True, 1, 1, False),  # SSE4.2
}
GENERATE = f"--max-new-tokens {TOKENS} --ignore-eos --threads 1 --json --prompt-ids".split()
GENERATE.append(",".join(map(str, PROMPT[:PROMPT_TOKENS])))
"""Arguments of the C++ program for a text as emulated.py decodes it."""
FORMATS = ("full", "int8", "int4", "source", "w8a8")


def program_at(name: str) -> Path:
    """Return the path of a program of the C++ build. Skip the test if there is none."""
    if not (PROGRAMS / name).exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    return PROGRAMS / name


def emulated(cpu: str, *command: object) -> subprocess.CompletedProcess[str]:
    """Run a command on an emulated CPU."""
    folders = [*sys.path[1:], str(ROOT / "runtime")]
    # Such a variable would choose OpenBLAS's kernels, in place of the emulated CPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(folders)}
    whole = ["qemu-x86_64", "-cpu", cpu, *map(str, command)]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def bundles(
    in_format: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Bundles by format, copied because the tests write files into them."""
    folder = tmp_path_factory.mktemp("formats")
    source, _ = export_of_type("Q4_1", folder / "gguf")
    return {
        name: source if name == "source" else shutil.copytree(in_format(name), folder / name)
        for name in FORMATS
    }


@pytest.fixture(scope="session")
def products(bundles: dict[str, Path]) -> list[Product]:
    """The 8-bit products of the w8a8 bundle.

    The bundle gets sums.onnx, a trunk whose outputs are the inputs and results of these products,
    and sums.inputs.npz, inputs for it.
    """
    bundle, rows = bundles["w8a8"], 9
    model, manifest = ir.load(bundle / "trunk.cpu.onnx"), read_manifest(bundle)
    exposed = expose_products(model.graph)
    ir.save(model, bundle / "sums.onnx")
    sizes, random = manifest.model, np.random.default_rng(0)
    cache = np.zeros((1, sizes.kv_heads, 64, sizes.head_dim), np.float32)
    caches = dict.fromkeys(cache_names(PAST, sizes.layers), cache)
    plan = prefill_plan(rows)
    inputs = {
        "input_ids": random.integers(4, 200, (1, rows)),
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.zeros(1, np.int64),
        "logit_rows": plan.logit_rows,
        LOOKAHEAD_ROWS: plan.lookahead_rows,
    }
    np.savez(bundle / "sums.inputs.npz", **inputs, **caches)
    return exposed


Printed = Mapping[str, Mapping[str, Any]]
"""What emulated.py prints, by CPU and format."""


@pytest.fixture(scope="session")
def printed(bundles: dict[str, Path], products: list[Product]) -> Printed:
    """Run emulated.py on every CPU, two at a time. They also write the outputs of sums.onnx into
    CPU.npz beside the bundle."""

    def run(cpu: str) -> Mapping[str, Any]:
        results = bundles["w8a8"].with_name(f"{cpu}.npz")
        program = Path(__file__).with_name("emulated.py")
        done = emulated(cpu, Path(sys.executable).resolve(), program, results, *bundles.values())
        assert done.returncode == 0, done.stderr
        return dict(zip(bundles, json.loads(done.stdout), strict=True))

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CPUS, pool.map(run, CPUS), strict=True))


@pytest.mark.parametrize("cpu", CPUS)
def test_the_kernels_of_each_cpu_are_recognized(printed: Printed, cpu: str):
    sums, int4_rows, int8_rows, softmax = CPUS[cpu]
    rows = {
        "full": 1,
        "int8": int8_rows,
        "int4": max(int4_rows, int8_rows),
        "source": max(int4_rows, int8_rows),
    }
    for name, least_rows in rows.items():
        expected = {"exact_sums": sums, "least_rows": least_rows, "equal_softmax": softmax}
        assert printed[cpu][name]["kernels"] == expected, name


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_every_plan_writes_plain_decodings_text(printed: Printed, cpu: str, name: str):
    """With one slot and with three. The chunks in which a prompt is read do not matter either."""
    for slots in ("1", "3"):
        of_slots = printed[cpu][name]["slots"][slots]
        for key, tokens in of_slots["texts"].items():
            temperature = key.rpartition(" ")[2]
            assert tokens == of_slots["texts"][f"ar at {temperature}"], key
        assert of_slots["same_entries"] and of_slots["chunks"], slots
        assert of_slots["cached"] == 48  # of 50 prompt tokens: three blocks of 16


@pytest.mark.parametrize("cpu", CPUS)
def test_8_bit_products_are_exact_sums_of_integers(
    printed: Printed,
    bundles: dict[str, Path],
    products: list[Product],
    cpu: str,
):
    assert len(products) > 5
    with np.load(bundles["w8a8"].with_name(f"{cpu}.npz")) as results:
        for each in products:
            assert each.is_exact(results[each.rows], results[each.result]), each.result


@pytest.mark.parametrize("cpu", CPUS)
def test_the_cpp_program_finds_the_same_kernels(
    printed: Printed, bundles: dict[str, Path], cpu: str
):
    done = emulated(cpu, program_at("kernels"), *bundles.values())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(Kernels(**printed[cpu][name]["kernels"])) for name in bundles
    ]


@pytest.fixture(scope="session")
def by_cpp(
    bundles: dict[str, Path],
) -> Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]]:
    """The finished runs of the C++ program, two at a time, by CPU, format and plan."""
    program = program_at("pass-cpp")
    runs = [*product(CPUS, FORMATS, ("ar", "fused"))]

    def run(cpu: str, name: str, plan: str) -> subprocess.CompletedProcess[str]:
        return emulated(cpu, program, "generate", bundles[name], *GENERATE, "--plan", plan)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_cpp_program_writes_the_same_text(
    printed: Printed,
    by_cpp: Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]],
    cpu: str,
    name: str,
):
    for plan in ("ar", "fused"):
        done = by_cpp[cpu, name, plan]
        assert done.returncode == 0, done.stderr
        expected = printed[cpu][name]["slots"]["1"]["texts"][f"{plan} at 0.0"]
        assert json.loads(done.stdout)["token_ids"] == expected, plan
