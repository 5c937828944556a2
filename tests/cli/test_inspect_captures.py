"""pass-run inspect --device lists which passes are captured as CUDA graphs, on fake devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_sessions import Gpu, with_engines
from fake_cuda import FakeCuda
from fake_ort_cuda import FakeCaptures
from fake_tensorrt import VERSION
from pass_run import output, refusal

from pass_runtime import read_manifest
from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.ort import backend as ort_backend


def test_captured_passes_of_engines_are_listed(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """TensorRT captures whole passes, of every plan, sampler, batch size and KV capacity."""
    gpu = Gpu(with_engines(tiny_bundle, tmp_path, 1, 2), monkeypatch)
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: gpu.cuda)
    flags = ("--device", "tensorrt", "--max-batch-size", 2)
    *lines, last = output("inspect", gpu.bundle, *flags).splitlines()
    passes = (
        "pass fused-6 2 truncated over 512 columns",
        "prefill 32 1 over 640 columns",
        "pass ar 1 greedy over 640",
    )
    for name in passes:
        assert any(line.startswith(f"captured: yes, {name}") for line in lines), name
    assert last == f"tensorrt {VERSION}: {len(lines)} of {len(lines)} captured as CUDA graphs"
    gpu.assert_all_freed()


def test_failed_captures_have_their_reason(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = Gpu(with_engines(tiny_bundle, tmp_path), monkeypatch)
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: gpu.cuda)
    gpu.cuda.fail_capture = "cudaGraphInstantiate"
    printed = json.loads(output("inspect", gpu.bundle, "--json", "--device", "tensorrt"))
    assert printed["device"] == f"tensorrt {VERSION}" and printed["engines"]
    assert len(printed["captures"]) > 20
    for reason in printed["captures"].values():
        assert "cudaGraphInstantiate failed with CUDA error 901" in reason


def test_captured_graphs_of_onnx_runtime_are_listed(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
):
    """ONNX Runtime captures the trunk and each tail separately. It runs on the CPU here."""
    captures, memory, capabilities = FakeCaptures(monkeypatch), FakeCuda(), ort_backend.Capabilities
    monkeypatch.setattr(ort_backend, "choose_device", lambda _: "cpu")
    monkeypatch.setattr(ort_backend, "open_memory", lambda _: Cuda(memory))
    on_cuda = lambda _kind, *rest, **more: capabilities("cuda", *rest, **more)  # noqa: E731
    monkeypatch.setattr(ort_backend, "Capabilities", on_cuda)
    captures.refused = ("tail.ar.greedy",)
    *lines, last = output("inspect", tiny_bundle, "--device", "cuda").splitlines()
    (refused,) = [line for line in lines if not line.startswith("captured: yes, ")]
    assert refused.startswith("captured: no, tail.ar.greedy.onnx: ")
    assert "CUDA failure 901" in refused
    assert last == f"cuda: {len(lines) - 1} of {len(lines)} captured as CUDA graphs"
    tails = {
        f"tail.{plan}.{sampler}.onnx"
        for plan in ("ar", "verify-6")
        for sampler in ("sample", "truncated")
    }
    trunk = read_manifest(tiny_bundle).trunk_file("cpu", DEFAULT_BATCH)
    assert {line.removeprefix("captured: yes, ") for line in lines} > {trunk, *tails}
    assert not memory.allocations


def test_devices_without_cuda_graphs_are_refused(tiny_bundle: Path):
    for device in ("cpu", "auto"):
        assert "CUDA graphs" in refusal("inspect", tiny_bundle, "--device", device)
    assert "unknown device 'gpu'" in refusal("inspect", tiny_bundle, "--device", "gpu")
