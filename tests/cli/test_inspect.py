"""pass-run inspect prints the manifest, as lines or as JSON. With --device it lists the passes that
are captured as CUDA graphs; the devices are fakes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engine_sessions import Gpu, with_engines
from fake_cuda import FakeCuda
from fake_ort_cuda import FakeCaptures
from fake_tensorrt import VERSION
from pass_run import bundle_copy, output, refusal

from pass_runtime import read_manifest
from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.ort import backend as ort_backend
from pass_runtime.backends.ort.session import kernels_name
from pass_runtime.bundle.plan import make_plan


def test_json_is_the_manifest_as_plain_data(adapter_bundle):
    printed = json.loads(output("inspect", adapter_bundle, "--json"))
    manifest = read_manifest(adapter_bundle)
    assert printed["model"]["name"] == manifest.model.name and printed["model"]["layers"] == 2
    kv_bytes = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head size, fp32
    assert printed["model"]["kv_bytes_per_token"] == kv_bytes
    assert printed["lookahead"]["length"] == 8 and printed["lookahead"]["adapter_rank"] == 4
    assert printed["rule"] == "match" and printed["engines"] == []
    assert printed["content"] == manifest.content_hash
    for name, info in printed["files"].items():
        assert info["bytes"] == (adapter_bundle / name).stat().st_size
    assert printed["bytes"] == sum(info["bytes"] for info in printed["files"].values())
    rows = {window["name"]: window["rows"] for window in printed["windows"]}
    names, lookaheads = ("ar", "two-pass", "fused"), range(1, 9)
    plans = [make_plan(name, lookahead) for name in names for lookahead in lookaheads]
    of_plans = {window.name: window.width for plan in plans for window in plan.windows}
    assert rows == of_plans | {"copy-16": 17}  # Verify windows do for shorter copies.
    assert printed["kernels"] == (kernels_name() or "onnxruntime")
    assert printed["tools"]["onnxruntime"] and printed["verified"] is False


def test_lines_describe_the_bundle(adapter_bundle):
    text = output("inspect", adapter_bundle)
    for line in (
        "model.family: llama",
        "model.layers: 2",
        "model.dtype: float32",
        "lookahead.length: 8",
        "lookahead.adapter_rank: 4",
        "lookahead.trained: true",
        "rule: match",
        f"kernels: {kernels_name() or 'onnxruntime'}",
    ):
        assert f"\n{line}\n" in text
    assert "files.trunk.onnx.data.bytes: " in text and "sha256" not in text
    assert "│ fused-8 " in text


def test_files_are_read_with_verify_only(tiny_bundle, tmp_path):
    name = "trunk.onnx.data"
    copy = bundle_copy(tiny_bundle, tmp_path / "copy", without=name)
    assert output("inspect", copy, "--json")
    assert "is missing" in refusal("inspect", copy, "--verify")
    content = bytearray((tiny_bundle / name).read_bytes())
    content[5] ^= 1  # one bit
    (copy / name).write_bytes(content)
    assert "SHA-256" in refusal("inspect", copy, "--verify")
    assert json.loads(output("inspect", tiny_bundle, "--verify", "--json"))["verified"] is True
    assert "verified: true" in output("inspect", tiny_bundle, "--verify")


def test_engines_are_listed_and_checked(tiny_bundle, tmp_path):
    bundle = with_engines(tiny_bundle, tmp_path)
    manifest = read_manifest(bundle)
    (engines,) = manifest.engines
    old = engines.model_copy(update={"bundle": "of other files"})
    listed = manifest.model_copy(update={"engines": (engines, old)})
    (bundle / "pass_config.json").write_text(listed.text())
    current, other = json.loads(output("inspect", bundle, "--json"))["engines"]
    assert (current["current"], other["current"]) == (True, False)
    assert current["targets"] == ["sm90"]
    assert current["bytes"] == sum(engine.bytes for engine in engines.engines)
    assert current["capacities"] == [*engines.capacities]
    text = output("inspect", bundle)
    assert 'engines.0.targets: ["sm90"]' in text and "engines.1.current: false" in text
    name = engines.engines[0].file
    (engines.path(bundle) / name).unlink()
    assert f"{name} is missing" in refusal("inspect", bundle, "--verify")


def test_the_reason_why_kernels_are_missing(tiny_bundle, monkeypatch):
    monkeypatch.setenv("PASS_KERNELS", "off")
    line = "kernels: onnxruntime (ours are missing: PASS_KERNELS is off)"
    assert line in output("inspect", tiny_bundle)
    assert json.loads(output("inspect", tiny_bundle, "--json"))["kernels"] == "onnxruntime"


def test_no_session_of_the_bundle_is_opened(tiny_bundle):
    """ONNX Runtime is imported to load the kernels."""
    code = (
        "import sys; from click.testing import CliRunner; from pass_runtime.cli.main import main\n"
        f"assert CliRunner().invoke(main, ['inspect', {str(tiny_bundle)!r}]).exit_code == 0\n"
        "assert 'pass_runtime.backends.ort.backend' not in sys.modules and 'prompt_toolkit' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_directory_without_a_bundle_is_refused(tmp_path):
    assert "is not a bundle" in refusal("inspect", tmp_path)


@pytest.fixture
def gpu(tiny_bundle, tmp_path, monkeypatch):
    gpu = Gpu(with_engines(tiny_bundle, tmp_path, 1, 2), monkeypatch)
    monkeypatch.setattr("pass_runtime.backends.cuda.import_api", lambda: gpu.cuda)
    return gpu


def test_captured_passes_of_engines_are_listed(gpu):
    """TensorRT captures whole passes, of every plan, sampler, batch size and KV capacity."""
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


def test_failed_captures_have_their_reason(gpu):
    gpu.cuda.fail_capture = "cudaGraphInstantiate"
    printed = json.loads(output("inspect", gpu.bundle, "--json", "--device", "tensorrt"))
    assert printed["device"] == f"tensorrt {VERSION}" and printed["engines"]
    assert len(printed["captures"]) > 20
    for reason in printed["captures"].values():
        assert "cudaGraphInstantiate failed with CUDA error 901" in reason


def test_captured_graphs_of_onnx_runtime_are_listed(tiny_bundle, monkeypatch):
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


def test_devices_without_cuda_graphs_are_refused(tiny_bundle):
    for device in ("cpu", "auto"):
        assert "CUDA graphs" in refusal("inspect", tiny_bundle, "--device", device)
    assert "unknown device 'gpu'" in refusal("inspect", tiny_bundle, "--device", "gpu")
