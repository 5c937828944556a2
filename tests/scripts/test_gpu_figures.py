"""The figures of scripts/gpu_check.py: times of kernels by name, of onnxruntime-genai, and the
table beside the figures of an earlier run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from pass_runtime import load
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
import gpu_steps  # noqa: E402
from gpu_report import (  # noqa: E402
    FIGURES,
    Machine,
    Result,
    compared,
    figures,
    read_figures,
    tables,
    verdict,
    write_report,
)
from gpu_steps import kernel_rows, short_name, time_kernels  # noqa: E402

GPU = {"name": "GPU"}
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu<128, 64>>(cutlass::Params)"


def kernel(name: str, microseconds: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "cat": category, "dur": microseconds}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GEMM, "Kernel2 cutlass_80_tensorop_f16_s16816gemm_relu"),
        ("cutlass_80_simt_sgemm", "cutlass_80_simt_sgemm"),
        (
            "void onnxruntime::cuda::_UnaryElementWise<__half, OP_Sigmoid<a::B>, 4>(const T*, int)",
            "_UnaryElementWise OP_Sigmoid",
        ),
        ("void (anonymous namespace)::softmax_warp<float>(float*)", "softmax_warp"),
        ("sm90_xmma_gemm_f16f16_f16f32", "sm90_xmma_gemm_f16f16_f16f32"),
        ("Memcpy DtoH (Device -> Pinned)", "Memcpy DtoH"),
        ("x" * 200, "x" * 70),
    ],
)
def test_names_of_kernels(name: str, short: str):
    assert short_name(name) == short


def test_kernels_of_a_pass():
    """The rows are the sum, then kernels by their time, then the others as one row. Events of the
    CPU do not count."""
    events = [kernel(GEMM, 30.0), kernel(GEMM, 50.0), kernel("Memcpy DtoH", 2.0, "gpu_memcpy")]
    events += [kernel("cudaGraphLaunch", 500.0, "cuda_runtime"), {"name": "a mark", "ph": "i"}]
    events += [kernel(f"rare{i}", 1.0) for i in range(gpu_steps.SHOWN_KERNELS)]
    rows = kernel_rows("ar", events, 2)
    assert rows[0] == {"plan": "ar", "kernel": "all", "launches": 11.5, "microseconds": 51.0}
    gemm = {"kernel": short_name(GEMM), "launches": 1.0, "microseconds": 40.0}
    assert rows[1] == {"plan": "ar"} | gemm
    assert rows[2]["kernel"] == "Memcpy DtoH" and len(rows) == gpu_steps.SHOWN_KERNELS + 2
    assert rows[-1] == {"plan": "ar", "kernel": "2 others", "launches": 1.0, "microseconds": 1.0}
    with pytest.raises(PassError, match="saw no kernels"):
        kernel_rows("ar", [], 2)


def test_every_plan_is_profiled_alone(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """Each text is written once before, and there is no prefill: the only prompt token is the
    root."""
    counts = []

    def profiled(work: Any) -> tuple[list[dict[str, Any]], int]:
        """Record one kernel of 4 us for each pass."""
        counts.append(work())
        return [kernel("k", 4.0)] * counts[-1], counts[-1]

    with load(tiny_bundle, "cpu", threads=1) as session:
        monkeypatch.setattr(session.backend, "prefill", lambda *_: pytest.fail("a prefill"))
        report = time_kernels(session, profiled)
    plans = {row["plan"]: row for row in report["kernels"] if row["kernel"] == "all"}
    assert list(plans) == list(gpu_steps.PROFILED) and report["uncaptured"] == {}
    assert {(row["launches"], row["microseconds"]) for row in plans.values()} == {(1.0, 4.0)}
    assert counts[0] >= gpu_steps.PROFILED_TOKENS - 1 and counts[2] <= counts[0]


def test_why_kernels_cannot_be_timed(monkeypatch: pytest.MonkeyPatch):
    for activities, reason in ((set, "has no CUPTI"), (lambda: {1}, "")):
        cuda = SimpleNamespace(CUDA=1)
        torch = SimpleNamespace(ProfilerActivity=cuda, supported_activities=activities)
        monkeypatch.setitem(sys.modules, "torch.profiler", torch)
        why = gpu_report.why_no_profiler()
        assert reason in why and bool(why) == bool(reason)
    monkeypatch.setitem(sys.modules, "torch.profiler", None)
    assert "torch's profiler cannot be imported" in gpu_report.why_no_profiler()


def test_why_genai_cannot_be_timed(monkeypatch: pytest.MonkeyPatch):
    no_cuda = "has no CUDA; uninstall it, and run: pip install"
    for with_cuda, reason in ((False, no_cuda), (True, "")):
        module = SimpleNamespace(is_cuda_available=lambda answer=with_cuda: answer)
        monkeypatch.setitem(sys.modules, "onnxruntime_genai", module)
        why = gpu_report.why_no_genai()
        assert reason in why and bool(why) == bool(reason)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", None)
    assert "run: pip install onnxruntime-genai-cuda" in gpu_report.why_no_genai()


@pytest.mark.slow
def test_genai_is_timed(
    tiny_bundle: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On the CPU: onnxruntime-genai exports the model and decodes the prompts of pass-run bench."""
    pytest.importorskip("onnxruntime_genai")
    manifest = SimpleNamespace(model=SimpleNamespace(name=str(tiny_model)))
    monkeypatch.setitem(gpu_steps.build_genai.__globals__, "read_manifest", lambda _: manifest)
    path = tmp_path / "out.json"
    flags = ["--device=cpu", "--precision=fp32", "--tokens=3", f"--keep={tmp_path}", f"-o{path}"]
    done = CliRunner().invoke(gpu_steps.main, ["genai", str(tiny_bundle), *flags])
    assert done.exit_code == 0, done.output
    (plan,) = json.loads(path.read_text())["plans"]
    assert plan["plan"] == "genai fp32" and plan["tokens_per_second"] > 0
    assert (tmp_path / "genai-cpu/fp32/genai_config.json").is_file()


def test_measure_runs_every_step_that_has_figures(tmp_path: Path):
    def steps(missing: dict[str, str]) -> list[gpu_check.Step]:
        return gpu_check.plan_steps(Machine(GPU, "sm90", 80.0, {}, missing), tmp_path, 8, 4)

    chosen = [step.name for step in steps({}) if step.name.startswith(gpu_check.MEASURED)]
    assert {figure.step for figure in FIGURES.values()} <= set(chosen)
    assert {name.split()[1] for name in chosen if " " in name} == {"cuda"} and "tests" not in chosen
    without = steps({"profiler": "no CUPTI", "genai": "no genai"})
    blocked = {step.name: step.blocked for step in without}
    assert (blocked["kernels cuda"], blocked["genai cuda"]) == ("no CUPTI", "no genai")


AR = {"plan": "ar", "ratio": 1.0, "tokens_per_second": 500.0, "milliseconds_per_pass": 2.0}
FUSED = {"ratio": 1.4, "tokens_per_second": 700.0, "milliseconds_per_pass": 2.5}
FUSED_WINDOW = {"window": "fused-4", "ratio": 1.25}
FUSED_WINDOW |= {"trunk_milliseconds": 2.2, "tail_milliseconds": None}
KERNELS = {"plan": "ar, greedy", "kernel": "all", "launches": 500.0, "microseconds": 1500.0}
STEPS: dict[str, Any] = {
    "bench cuda greedy": {"plans": [AR, {"plan": "fused L=4"} | FUSED]},
    "rows cuda": {"rows": [FUSED_WINDOW]},
    "batch cuda": {"plans": [{"plan": "ar x1", "ratio": 1.0}, {"plan": "ar x8", "ratio": 5.0}]},
    "attention cuda": {"cells": [{"window": "fused-4", "capacity": 512, "milliseconds": 0.79}]},
    "kernels cuda": {"kernels": [KERNELS]},
    "genai cuda": {"plans": [{"plan": "genai fp16", "tokens_per_second": 600.0}]},
}
RESULTS = [Result(name, "ok", data=data) for name, data in STEPS.items()]
EXPECTED = {
    "ar, greedy: tokens/s": 500.0,
    "ar, greedy: ms a pass": 2.0,
    "fused, greedy: times ar": 1.4,
    "trunk, 25 rows, 20 of them look-ahead: times 1 row": 1.25,
    "ar, 8 sequences: times 1": 5.0,
    "onnxruntime-genai, greedy: tokens/s": 600.0,
    "layers of a 7B, GroupQueryAttention, 25 rows at 512: ms": 0.79,
    "kernels of a pass, ar, greedy: launches": 500.0,
    "kernels of a pass, ar, greedy: microseconds": 1500.0,
}


def test_figures_of_the_steps_that_ran():
    assert figures(RESULTS) == EXPECTED


def test_figures_beside_earlier_ones(tmp_path: Path):
    write_report(tmp_path, tmp_path, Machine(GPU), RESULTS)
    before = read_figures(tmp_path / "report.json")
    before |= {"fused, greedy: times ar": 0.7, "trunk, 1 row: ms": 1.74}
    rows = {row["figure"]: row for row in tables(Machine(), RESULTS, before)["figures"]}
    row = rows["fused, greedy: times ar"]
    assert row.pop("figure") == "fused, greedy: times ar"
    assert row == {"before": "0.7", "now": "1.4", "now / before": "2.00"}
    assert [*rows["trunk, 1 row: ms"].values()][1:] == ["1.74", "-", "-"]
    assert compared({}, EXPECTED)[0] == {"figure": "ar, greedy: tokens/s", "now": "500"}
    assert "| fused, greedy: times ar | 1.4 |" in (tmp_path / "report.md").read_text()
    (tmp_path / "other.json").write_text("[]")
    for other in ("other.json", "nothing.json"):
        with pytest.raises(PassError, match=other):
            read_figures(tmp_path / other)


@pytest.mark.parametrize("name", ["kernels cuda", "genai cuda", "attention cuda"])
def test_steps_that_only_compare_do_not_change_the_verdict(name: str):
    results = [Result("device", "ok"), Result(name, "failed", reason="no")]
    assert verdict(Machine(GPU), results)[0] == "works"
    assert verdict(Machine(GPU), [Result("genai cuda", "ok")])[0] == "nothing ran"
