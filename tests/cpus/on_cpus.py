"""On CPUs that qemu-user emulates (scripts/test.sh cpus), tiny bundles of every format write the
native CPU's texts and K/V, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from emulated import PROMPT, PROMPT_TOKENS, TOKENS

pytestmark = pytest.mark.timeout(0)
ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "build/cpp/release/pass-cpp"
CPUS = {
    # qemu's name: the kernels that run
    "Haswell": "avx2",
    "SandyBridge": "plain",
    "Nehalem": "plain",
}
GENERATE = f"--max-new-tokens {TOKENS} --ignore-eos --threads 1 --json --prompt-ids".split()
GENERATE.append(",".join(map(str, PROMPT[:PROMPT_TOKENS])))
"""Arguments of the C++ program for a text as emulated.py decodes it."""
FORMATS = ("full", "int8", "int4")

Printed = Mapping[str, Any]


def run_on(cpu: str | None, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    folders = [*sys.path[1:], str(ROOT / "runtime")]
    # Such a variable would choose OpenBLAS's kernels, in place of the emulated CPU.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(folders)} | variables
    emulator = [] if cpu is None else ["qemu-x86_64", "-cpu", cpu]
    whole = [*emulator, *map(str, command)]
    return subprocess.run(whole, env=environment, capture_output=True, text=True, check=False)


def printed_on(cpu: str | None, bundles: Mapping[str, Path], **variables: str) -> Printed:
    program = Path(__file__).with_name("emulated.py")
    python = Path(sys.executable).resolve()
    done = run_on(cpu, python, program, *bundles.values(), **variables)
    assert done.returncode == 0, done.stderr
    return dict(zip(bundles, json.loads(done.stdout), strict=True))


@pytest.fixture(scope="session")
def bundles(in_format: Callable[[str], Path]) -> dict[str, Path]:
    return {name: in_format(name) for name in FORMATS}


@pytest.fixture(scope="session")
def native(bundles: dict[str, Path]) -> Printed:
    return printed_on(None, bundles)


@pytest.fixture(scope="session")
def printed(bundles: dict[str, Path]) -> Mapping[str, Printed]:
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(CPUS, pool.map(lambda cpu: printed_on(cpu, bundles), CPUS), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_every_plan_writes_the_native_text(
    printed: Mapping[str, Printed], native: Printed, cpu: str, name: str
):
    assert printed[cpu][name]["kernels"] == CPUS[cpu]
    assert printed[cpu][name]["slots"] == native[name]["slots"]
    for slots in ("1", "3"):
        of_slots = native[name]["slots"][slots]
        for key, tokens in of_slots["texts"].items():
            temperature = key.rpartition(" ")[2]
            assert tokens == of_slots["texts"][f"ar at {temperature}"], key
        assert of_slots["same_entries"] and of_slots["in_chunks"] == of_slots["whole"], slots
        assert of_slots["cached"] == 48  # of 50 prompt tokens: three blocks of 16


@pytest.mark.parametrize("cpu", CPUS)
def test_without_kernels_the_portable_trunk_runs(bundles: dict[str, Path], cpu: str):
    of_int4 = printed_on(cpu, {"int4": bundles["int4"]}, PASS_KERNELS="off")["int4"]
    assert of_int4["kernels"] == "onnxruntime"
    for of_slots in of_int4["slots"].values():
        assert {len(tokens) for tokens in of_slots["texts"].values()} == {TOKENS}


@pytest.fixture(scope="session")
def by_cpp(
    bundles: dict[str, Path],
) -> Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]]:
    """Two at a time, by CPU, format and plan."""
    if not PROGRAM.exists():
        pytest.skip("no C++ build: run scripts/build_cpp.sh")
    runs = [*product(CPUS, FORMATS, ("ar", "fused"))]

    def run(cpu: str, name: str, plan: str) -> subprocess.CompletedProcess[str]:
        flags = [*GENERATE, "--plan", plan, "--verbose"]
        return run_on(cpu, PROGRAM, "generate", bundles[name], *flags)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(runs, pool.map(run, *zip(*runs, strict=True)), strict=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cpu", CPUS)
def test_the_cpp_program_writes_the_native_text(
    native: Printed,
    by_cpp: Mapping[tuple[str, str, str], subprocess.CompletedProcess[str]],
    cpu: str,
    name: str,
):
    for plan in ("ar", "fused"):
        done = by_cpp[cpu, name, plan]
        assert done.returncode == 0, done.stderr
        assert f"pass: kernels {CPUS[cpu]} of " in done.stderr
        expected = native[name]["slots"]["1"]["texts"][f"{plan} at 0.0"]
        assert json.loads(done.stdout)["token_ids"] == expected, plan
