"""scripts/gpu_check.sh without a GPU: its steps run on the CPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_check
import pytest
from click.testing import CliRunner
from gpu_check import Result, Step, plan_steps, run_steps, table, verdict

import pass_exporter.cli
from pass_runtime.backends.cuda import find_device

ROOT = Path(__file__).resolve().parents[2]


GPU = {"gpu": "A GPU, sm90", "gib": 80.0, "missing": {"tensorrt-rtx": "no target sm90"}}
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu<128, 64>>(cutlass::Params)"
ON_GPU = {"uncaptured": {}}
without_gpu = pytest.mark.skipif(
    find_device() is not None or shutil.which("nvidia-smi") is not None, reason="there is a GPU"
)


@pytest.mark.slow
@without_gpu
def test_without_a_gpu_nothing_runs(tmp_path: Path):
    done = subprocess.run(
        [ROOT / "scripts/gpu_check.sh", "-o", tmp_path],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and not (tmp_path / "report.json").exists()
    assert done.stdout.splitlines()[-1].startswith("VERDICT: nothing ran (error: ")


@pytest.mark.slow
def test_steps_run_and_give_a_verdict(tmp_path, tiny_bundle, monkeypatch):
    """On the CPU, which is said to be a GPU."""
    own, write = gpu_check.own, f"import sys; open(sys.argv[-1], 'w').write({json.dumps(GPU)!r})"

    def own_or_inspect(function: str, *arguments: object) -> list[str]:
        inspects = function == "inspect"
        return [sys.executable, "-c", write, "-o"] if inspects else own(function, *arguments)

    def steps_on_cpu(*given: Any) -> list[Step]:
        return [
            replace(
                step,
                command=[{"cuda": "cpu"}.get(word, word) for word in step.command],
                seconds=6000,
            )
            for step in plan_steps(*given)
        ]

    monkeypatch.setattr(gpu_check, "own", own_or_inspect)
    monkeypatch.setattr(gpu_check, "plan_steps", steps_on_cpu)
    only = [word for name in ("parity", "rows", "greedy") for word in ("--only", f"{name} c")]
    words = [tiny_bundle, "--tokens", 4, "--minutes", 100, "-o", tmp_path, *only]
    done = CliRunner().invoke(gpu_check.main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-1] == "VERDICT: works (3 steps on the GPU)"
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert [step["name"] for step in steps] == ["parity cuda", "rows cuda", "greedy cuda"]
    assert {plan["plan"] for plan in steps[2]["data"]["plans"]} >= {"ar", "auto"}


def steps_of(machine: dict[str, Any], bundle: Path, **options: Any) -> dict[str, Step]:
    given = {"tokens": 8, "layers": 4, "measure": False} | options
    return {step.name: step for step in plan_steps(machine, bundle, **given)}


def test_steps_are_planned_for_the_machine(tmp_path: Path, tiny_bundle: Path, monkeypatch):
    monkeypatch.setattr(gpu_check, "KEPT", tmp_path / "kept")
    steps = steps_of(GPU, tmp_path / "new")
    assert [*steps][:4] == ["parity cuda", "parity tensorrt", "parity tensorrt-rtx", "export"]
    assert steps["greedy tensorrt"].after == "build tensorrt" and [*steps][-1] == "tests"
    flags = pass_exporter.cli.build.make_context("build", [*steps["build tensorrt"].command[4:]])
    assert (flags.params["bundle"], flags.params["engine"]) == (tmp_path / "new", "tensorrt")
    for name, step in steps.items():
        assert (step.blocked == "no target sm90") == name.endswith("tensorrt-rtx")
    assert not steps_of(GPU, tmp_path, layers=32)["7B at 512"].blocked
    small = steps_of(GPU | {"gib": 16.0}, tmp_path, layers=32)
    assert (
        small["random 7B"].blocked
        == small["7B at 8192"].blocked
        == "32 layers need 21 GiB of GPU memory"
    )
    measured = steps_of(GPU, tiny_bundle, measure=True)
    assert "export" not in measured and not any("tensorrt" in name for name in measured)
    assert {"parity cuda", "rows cuda", "batch", "kernels", "genai", "7B at 512"} <= {*measured}
    assert "--rows 1,7,49" in " ".join(measured["rows cuda"].command)


def run(
    folder: Path, *steps: tuple[str, str], seconds: int = 60, budget: float = 100
) -> list[Result]:
    """Run Python programs as steps, each after the one before."""
    after, chain = "", list[Step]()
    for name, code in steps:
        chain.append(Step(name, [sys.executable, "-c", code, "-o"], seconds, after=after))
        after = name
    report: dict[str, Any] = {}
    results = run_steps(chain, budget, report, folder)
    assert json.loads((folder / "report.json").read_text()) == report
    return results


def test_a_step_that_fails_or_hangs_ends_alone(tmp_path: Path):
    writes = "import sys; open(sys.argv[-1], 'w').write('{\"uncaptured\": {}}')"
    fails = f"{writes}; sys.exit('one\\n two')"
    results = run(tmp_path, ("a", writes), ("b", fails), ("c", writes))
    assert [(each.status, each.reason) for each in results] == [
        *(("ok", ""), ("failed", "one / two"), ("skipped", "b did not run"))
    ]
    assert results[1].data == ON_GPU
    hangs = "import subprocess, time; subprocess.Popen(['sleep', '71']); time.sleep(60)"
    (result,) = run(tmp_path, ("a", hangs), seconds=1)
    assert (result.status, result.reason) == ("failed", "stopped after 1 s")
    for budget in (0.5, 2):  # before it begins, and while it runs
        (result,) = run(tmp_path, ("a", hangs), budget=budget)
        assert (result.status, result.reason) == ("skipped", "the time is over")


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([Result("inspect", "failed", "no driver")], ("nothing ran", "no driver")),
        ([Result("a", "skipped", "no x")], ("nothing ran", "no x")),
        ([Result("a", "ok", data=ON_GPU)], ("works", "1 steps on the GPU")),
        ([Result("a", "ok", data=ON_GPU), Result("b", "failed", "x")], ("wrong", "b: x")),
        (
            [Result("genai", "failed", "x"), Result("a", "ok", data=ON_GPU)],
            ("works", "1 steps on the GPU"),
        ),
        ([Result("a", "ok", data={"uncaptured": {"t": "y"}})], ("not captured", "a: t: y")),
    ],
)
def test_the_verdict_follows_from_the_results(results, expected):
    assert verdict(results) == expected


def test_the_table_has_a_row_for_each_entry():
    plans = [{"plan": "ar", "tokens_per_second": 500.0, "ratio": 1.0}]
    rows = [{"window": "ar", "trunk_milliseconds": 1.74, "tail_milliseconds": None}]
    results = [
        Result("greedy cuda", "ok", data={"plans": plans}),
        Result("rows", "ok", data={"rows": rows}),
    ]
    shown = [[*row.values()] for row in table([*results, Result("genai", "skipped", "none")])]
    assert shown == [
        ["greedy cuda", "ar", "500 tokens/s, 1 of the first"],
        ["rows", "ar", "1.74 ms trunk"],
        ["genai", "skipped", "none"],
    ]


def test_kernels_are_counted_by_name():
    def kernel(name: str, microseconds: float, category: str = "kernel") -> dict[str, Any]:
        return {"name": name, "cat": category, "dur": microseconds}

    events = [kernel(GEMM, 30.0), kernel(GEMM, 50.0), kernel("Memcpy DtoH (x)", 2.0, "gpu_memcpy")]
    events += [kernel("cudaGraphLaunch", 500.0, "cuda_runtime"), {"name": "a mark", "ph": "i"}]
    rows = [[*each.values()] for each in gpu_check.kernel_entries("ar", events, 2)]
    gemm = "ar: Kernel2 cutlass_80_tensorop_f16_s16816gemm_relu"
    assert rows == [["ar: all", 1.5, 41.0], [gemm, 1.0, 40.0], ["ar: Memcpy DtoH", 0.5, 1.0]]
    with pytest.raises(gpu_check.PassError, match="saw no kernels"):
        gpu_check.kernel_entries("ar", [], 2)
    name = "void onnxruntime::cuda::_UnaryElementWise<__half, OP_Sigmoid<a::B>, 4>(const T*, int)"
    assert gpu_check.short_name(name) == "_UnaryElementWise OP_Sigmoid"
    name = "void (anonymous namespace)::softmax_warp<float>(float*)"
    assert gpu_check.short_name(name) == "softmax_warp"
