"""Sessions on fake GPUs: their memory, and their numbers, as in `cuda:1`. Every thread has a
current device of its own."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import onnxruntime as ort
import pytest
from engine_sessions import (
    SAMPLINGS,
    Gpu,
    PromptAndOptions,
    assert_cpu_writes_all,
    ort_session_on,
    run_prompt,
    with_engines,
)
from fake_cuda import FakeCuda
from test_ort_engine import FakeSession

from pass_runtime import GenerateOptions, load
from pass_runtime.backends import cuda as cuda_api
from pass_runtime.backends.cuda import find_device
from pass_runtime.backends.memory import HostMemory
from pass_runtime.backends.open import gpus_of_replica, split_device
from pass_runtime.backends.ort.backend import BoundSession, BoundTensor
from pass_runtime.backends.ort.session import open_memory, open_session
from pass_runtime.errors import PassError

PROMPT = [2 + i % 300 for i in range(200)]
REQUESTS: list[PromptAndOptions] = [
    ([5, 6, 7], GenerateOptions(30, SAMPLINGS[1], plan="fused", ignore_eos=True)),
    # This request needs a KV capacity of 512.
    (PROMPT, GenerateOptions(100, SAMPLINGS[2], plan="two-pass", ignore_eos=True)),
    (PROMPT[:40], GenerateOptions(20, SAMPLINGS[0], plan="ar", ignore_eos=True)),
]
NO_GPU_2 = (
    r"^there is no GPU 2: 2 GPUs are visible, numbers 0 to 1 \(see nvidia-smi, and "
    r"CUDA_VISIBLE_DEVICES\)$"
)


@pytest.fixture(scope="module")
def engine_bundle(adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(adapter_bundle, tmp_path_factory.mktemp("numbers"))


@pytest.fixture
def two_gpus(engine_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(engine_bundle, monkeypatch, devices=2)
    monkeypatch.setattr(cuda_api, "import_api", lambda: gpu.cuda)
    monkeypatch.setattr("pass_runtime.backends.ort.session.import_api", lambda: gpu.cuda)
    return gpu


def test_a_device_name_may_end_with_a_number():
    assert [split_device(name) for name in ("cpu", "cuda")] == [("cpu", 0), ("cuda", 0)]
    assert split_device("cuda:1") == ("cuda", 1)
    assert split_device("tensorrt-rtx:12") == ("tensorrt-rtx", 12)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:", "must follow the colon, as in cuda:1"),
        ("cuda:-1", "must follow the colon"),
        ("cuda:one", "must follow the colon"),
        ("cpu:0", "cpu takes no number; only cuda, tensorrt, tensorrt-rtx do, as in cuda:1"),
        ("auto:1", "auto takes no number"),
        ("gpu:1", "unknown device 'gpu:1': choose one of cpu, cuda,"),
    ],
)
def test_other_device_names_are_refused(name: str, message: str, tiny_bundle: Path):
    with pytest.raises(PassError, match=message):
        load(tiny_bundle, name)


@pytest.mark.parametrize("number", [0, 1])
def test_engines_work_on_the_gpu_of_that_number_only(two_gpus: Gpu, number: int):
    """Each thread that uses the session has its own current device again afterwards."""
    before = 1 - number
    two_gpus.cuda.cudaSetDevice(before)
    with load(two_gpus.bundle, f"tensorrt:{number}") as session:
        assert run_prompt(session, count=4).token_ids
        thread = threading.Thread(target=run_prompt, args=(session,), kwargs={"count": 4})
        thread.start()
        thread.join()
        assert two_gpus.cuda.cudaGetDevice()[1] == before
    assert two_gpus.cuda.used_devices == {number} and two_gpus.cuda.cudaGetDevice()[1] == before
    two_gpus.assert_all_freed()


def test_a_number_that_does_not_exist_is_refused_with_the_count(two_gpus: Gpu, monkeypatch):
    FakeSession(monkeypatch, 0)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    for device in ("tensorrt:2", "cuda:2"):
        with pytest.raises(PassError, match=NO_GPU_2):
            load(two_gpus.bundle, device)
    with pytest.raises(PassError, match="there is no GPU 1: 1 GPU is visible, number 0"):
        cuda_api.require_device(FakeCuda(), 1)
    assert find_device(two_gpus.cuda, 1) is not None and find_device(two_gpus.cuda, 2) is None


def test_onnx_runtime_gets_the_number(two_gpus: Gpu, tmp_path: Path, monkeypatch):
    """For sessions, for what is bound to them, and for the memory that they work in."""
    session = FakeSession(monkeypatch, 1)
    (tmp_path / "x.onnx").write_bytes(b"")
    open_session(tmp_path / "x.onnx", "cuda:1")
    assert [settings["device_id"] for settings in session.tried_settings] == ["1", "1"]
    assert set(session.tried_settings[0]) > {"enable_cuda_graph", "use_tf32"}
    memory = open_memory("cuda:1")
    assert two_gpus.cuda.used_devices == {1}
    memory.close()
    assert two_gpus.cuda.used_devices == {1}
    bound: list[tuple[object, ...]] = []

    class Binding:
        def bind_input(self, *arguments: object) -> None:
            bound.append(arguments)

        bind_output = bind_input

    session.io_binding = Binding
    tensor = BoundTensor("ids", "int64", (1,), 256)
    BoundSession(session, "cuda:1", [tensor], [tensor], ([], []), 1, HostMemory(), pytest.fail)
    assert [arguments[1:3] for arguments in bound] == [("cuda", 1)] * 2


def test_ray_chooses_the_gpu_of_a_replica():
    assert [gpus_of_replica(name) for name in ("cpu", "auto", "cuda", "tensorrt")] == [0, 0, 1, 1]
    message = r"'cuda:1': Ray chooses the GPU of every replica; use cuda$"
    with pytest.raises(PassError, match=message):
        gpus_of_replica("cuda:1")


def test_requests_on_device_memory_write_what_the_cpu_writes(adapter_bundle: Path):
    """Meanwhile the KV cache moves, because it grows and because the batch becomes smaller."""
    device = FakeCuda()
    with ort_session_on(device, adapter_bundle) as session:
        for _ in range(2):
            assert_cpu_writes_all(session, adapter_bundle, REQUESTS)
        assert device.mallocs > len(device.allocations)  # some were freed
    assert not device.allocations and not device.streams


@pytest.mark.slow
def test_a_forgotten_session_frees_its_device_memory(adapter_bundle: Path):
    device = FakeCuda()
    session = ort_session_on(device, adapter_bundle)
    session.generate_ids(*REQUESTS[0]).result()
    assert device.allocations
    del session
    gc.collect()
    assert not device.allocations and not device.streams
