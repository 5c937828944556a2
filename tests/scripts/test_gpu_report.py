"""The report of scripts/gpu_check.py: why parts cannot be used, figures beside those of an earlier
run, tables of times, and advice on attention."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
import gpu_report  # noqa: E402
from gpu_report import (  # noqa: E402
    FIGURES,
    Machine,
    Result,
    attention_advice,
    compared,
    figures,
    read_figures,
    tables,
    verdict,
    write_report,
)

GPU = {"name": "GPU", "memory.total": "81559 MiB", "compute_cap": "9.0"}


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


@pytest.mark.parametrize(
    ("code", "hint"), [(35, "older than the CUDA library"), (100, "visible to nvidia-smi")]
)
def test_the_reason_why_cuda_sees_no_gpu_is_given(
    code: int, hint: str, monkeypatch: pytest.MonkeyPatch
):
    api = SimpleNamespace(cudaGetDeviceCount=lambda: (code, 0))
    monkeypatch.setattr(gpu_report, "nvidia_smi", lambda: GPU)
    monkeypatch.setattr(gpu_report, "find_device", lambda: find_device(api))
    monkeypatch.setattr(gpu_report, "why_no_device", lambda: why_no_device(api))
    missing = gpu_report.find_machine().missing
    assert f"CUDA error {code}" in missing["cuda-python"] and hint in missing["cuda-python"]
    assert missing["tensorrt"] == missing["cuda-python"]


def test_times_of_layers_are_compared_with_the_bandwidth():
    """At this bandwidth, copying what the pass reads takes half as long as the pass. A pass over
    all layers is assumed to take longer in proportion to the bytes that it reads."""
    cell = {"window": "ar", "rows": 1, "ratio": 1.0, "capacity": 512, "milliseconds": 2.0}
    cell |= {"layers": 4, "layer_bytes": 200, "other_bytes": 200}
    results = [
        Result("device", "ok", data={"checks": [], "copy_bandwidth": 1e6}),
        Result("layers cuda", "ok", data={"cells": [cell]}),
    ]
    (row,) = tables(Machine(GPU), results)["layers cuda"]
    assert row["of the bound"] == "0.50" and row["7B, extrapolated"] == f"{2 * 6600 / 1000:.2f}"
    (row,) = tables(Machine(GPU), results[1:])["layers cuda"]
    assert row["of the bound"] == "-"


def test_advice_on_cuda_attention_follows_from_logits_and_times():
    plain = {"logits": [1.0, -4.0], "cells": [{"milliseconds": 2.0}, {"milliseconds": 4.0}]}

    def advice(logits: list[float], factor: float, status: str = "ok") -> str:
        cells = [{"milliseconds": factor * cell["milliseconds"]} for cell in plain["cells"]]
        other = {"logits": logits, "cells": cells}
        return attention_advice(Result("attention cuda", status, 1, "no kernel", other), plain)

    leave_out = "leave out --cuda-attention attention: passes take 0.80 times as long without it"
    assert advice([1.0, -4.1], 0.8) == leave_out
    assert advice([1.0, -4.0], 0.99).startswith("export with")
    assert "logits differ by up to 0.05 of" in advice([1.2, -4.0], 0.8)
    assert advice([], 1, "failed") == "export with --cuda-attention attention: no kernel"
    results = [
        Result("layers cuda", "ok"),
        Result("attention cuda", "failed"),
    ]
    assert verdict(Machine(GPU), results) == ("works", "1 steps on the GPU")


def test_times_of_windows_are_shown():
    row = {"rows": 9, "window": "prefill-9", "lookahead_rows": 0}
    row |= {"trunk_milliseconds": 1.5, "tail_milliseconds": None}
    result = Result("rows cuda", "ok", 0, "", {"rows": [row]})
    (shown,) = tables(Machine(GPU), [result])["rows cuda"]
    assert [*shown.values()] == ["prefill-9", "9", "-", "1.50", "-"]
