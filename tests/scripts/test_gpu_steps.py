"""scripts/gpu_steps.py on the CPU or on a fake device: copies, a tiny model, times of a model's
layers, kernels by name, and onnxruntime-genai."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fake_cuda import FakeCuda
from safetensors.numpy import load_file

from pass_runtime import load
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_steps  # noqa: E402
from gpu_steps import kernel_rows, short_name, time_kernels  # noqa: E402

GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_relu<128, 64>>(cutlass::Params)"


@pytest.mark.slow
def test_the_device_step_copies_and_captures():
    gpu = FakeCuda(target=(8, 9))
    report = gpu_steps.check_device(gpu)
    results = {check["check"]: check["result"] for check in report["checks"]}
    assert (results["copy"], results["capture"]) == ("unchanged", "replayed twice")
    assert not report["uncaptured"]
    assert not gpu.allocations and not gpu.streams and not gpu.graphs


@pytest.mark.slow
def test_a_refused_capture_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(gpu, "cudaStreamBeginCapture", lambda *_: (900,), raising=False)
    report = gpu_steps.check_device(gpu)
    assert "CUDA error 900" in report["uncaptured"]["a copy"]
    assert not gpu.allocations and not gpu.streams


def test_too_little_memory_is_an_error():
    gpu = FakeCuda(target=(8, 9), limit=gpu_steps.COPY_BYTES - 1)
    with pytest.raises(PassError, match="the GPU has no 1 MiB left"):
        gpu_steps.check_device(gpu)
    assert not gpu.allocations and not gpu.streams


def test_a_copy_with_changed_bytes_is_an_error(monkeypatch: pytest.MonkeyPatch):
    gpu = FakeCuda(target=(8, 9))
    monkeypatch.setattr(gpu_steps.Cuda, "download", lambda _self, array, _address: array.fill(1))
    with pytest.raises(PassError, match="a copy to the GPU and back changed"):
        gpu_steps.check_device(gpu)


@pytest.mark.slow
def test_the_tiny_step_on_the_cpu(tmp_path: Path):
    """Every plan of the tiny model writes the same text."""
    path = tmp_path / "out.json"
    command = [sys.executable, ROOT / "scripts/gpu_steps.py", "tiny", "--device", "cpu", "-o", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert [plan["same_tokens"] for plan in report["plans"]] == [True] * 4
    assert report["uncaptured"] == {}


@pytest.mark.slow
def test_the_layers_step_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The step makes one model, and a bundle for each kind of attention. `layer_bytes` are the
    bytes of a layer's matrices, and of K and V of as many tokens as the capacity."""
    sizes = {name: size for name, size in gpu_steps.TINY_SIZES.items() if name != "layers"}
    monkeypatch.setattr(gpu_steps, "SIZES_OF_7B", sizes)
    reports = []
    flags = ["--device=cpu", "--layers=1", "--rows=1", "--rows=5", "--capacity=64"]
    for number, kind in enumerate(("attention", "group-query", "attention")):
        path = tmp_path / f"{number}.json"
        words = [
            *flags,
            "--capacity=128",
            f"--keep={tmp_path}",
            f"--cuda-attention={kind}",
            "-o",
            str(path),
        ]
        done = CliRunner().invoke(gpu_steps.main, ["layers", *words])
        assert done.exit_code == 0, done.output
        reports.append(json.loads(path.read_text()))
        # From now on the model is there, and must not be made again.
        monkeypatch.setattr(gpu_steps.subprocess, "run", lambda *_, **__: None)
    (folder,) = {path.parent for path in tmp_path.glob("*/model")}
    assert sorted(path.name for path in folder.iterdir()) == ["attention", "group-query", "model"]
    for report in reports:
        cells = [(cell["rows"], cell["capacity"]) for cell in report["cells"]]
        assert list(dict.fromkeys(cells)) == [(1, 64), (5, 64), (1, 128), (5, 128)]
        assert all(cell["milliseconds"] > 0 for cell in report["cells"])
        assert report["uncaptured"] == {}
    assert reports[0]["logits"] == reports[1]["logits"] == reports[2]["logits"] != []
    parameters = load_file(folder / "model/layer-0.safetensors")
    matrices = sum(2 * weight.size for weight in parameters.values() if weight.ndim == 2)
    kv = 2 * 2 * 2 * 32 * 64  # 2 bytes; K and V; 2 heads of 32 numbers; 64 tokens
    assert reports[0]["cells"][0]["layer_bytes"] == matrices + kv
    assert reports[0]["cells"][0]["other_bytes"] == 2 * 128 * 1024


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
def test_names_of_kernels_are_shortened(name: str, short: str):
    assert short_name(name) == short


def test_rows_of_a_pass_kernels_are_sorted_by_time():
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
