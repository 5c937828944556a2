from __future__ import annotations

import gc
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_sessions import (
    SAMPLINGS,
    PromptAndOptions,
    assert_cpu_writes,
    submit_together,
)
from fake_cuda import FakeCuda, cuda_without_gpu
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, Session
from pass_runtime.backends.cuda import Cuda, import_api, why_no_device
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.session import open_memory
from pass_runtime.bundle.manifest import TOKENIZER_FILE
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError

PROMPT = [2 + i % 300 for i in range(200)]
REQUESTS: list[PromptAndOptions] = [
    ([5, 6, 7], GenerateOptions(30, SAMPLINGS[1], plan="fused", ignore_eos=True)),
    # This request needs a KV capacity of 512.
    (PROMPT, GenerateOptions(100, SAMPLINGS[2], plan="two-pass", ignore_eos=True)),
    (PROMPT[:40], GenerateOptions(20, SAMPLINGS[0], plan="ar", ignore_eos=True)),
]
Open = Callable[[FakeCuda], Session]
"""Opens a session with two slots on a device."""


@pytest.fixture
def open_on(adapter_bundle: Path) -> Open:
    def open_on(device: FakeCuda) -> Session:
        manifest = read_manifest(adapter_bundle)
        options = {"threads": 1, "max_batch_size": 2, "memory": Cuda(device)}
        backend = OrtBackend(adapter_bundle, manifest, "cpu", **options)
        return Session(manifest, backend, Tokenizer.from_file(str(adapter_bundle / TOKENIZER_FILE)))

    return open_on


def test_requests_on_device_memory_write_what_the_cpu_writes(adapter_bundle: Path, open_on: Open):
    """Meanwhile the KV cache moves, because it grows and because the batch becomes smaller."""
    device = FakeCuda()
    with open_on(device) as session:
        for _ in range(2):
            for request, stream in zip(REQUESTS, submit_together(session, REQUESTS), strict=True):
                assert_cpu_writes(adapter_bundle, request, stream.result().token_ids)
        assert device.mallocs > len(device.allocations)  # some were freed
    assert not device.allocations and not device.streams


@pytest.mark.slow
def test_a_forgotten_session_frees_its_device_memory(open_on: Open):
    device = FakeCuda()
    session = open_on(device)
    session.generate_ids(*REQUESTS[0]).result()
    assert device.allocations
    del session
    gc.collect()
    assert not device.allocations and not device.streams


def test_without_cuda_python_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    message = r"cannot be imported .*; run: pip install cuda-python$"
    for call in (import_api, lambda: open_memory("cuda")):
        with pytest.raises(PassError, match=message):
            call()


def test_the_error_names_an_old_driver_and_the_driver_that_is_needed():
    message = why_no_device(cuda_without_gpu(12040))
    assert "runs CUDA up to 12.4, and the library is CUDA 13.4" in message
    assert "a driver for CUDA 13, 580 or newer" in message
    assert "install" not in message.replace("installed", "")
    with_library_12 = cuda_without_gpu(11080, library_version=12090)
    assert "a driver for CUDA 12, 525 or newer" in why_no_device(with_library_12)
    message = r"cudaStreamCreateWithFlags .* up to 12\.4, .* 580 or newer"
    with pytest.raises(PassError, match=message):
        Cuda(cuda_without_gpu(12040))


def test_the_extra_gpu_installs_onnx_runtime_for_cuda_and_cuda_python():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    names = {re.split("[<>=]", requirement)[0] for requirement in extras["gpu"]}
    assert names == {"onnxruntime-gpu[cuda,cudnn]", "cuda-python"}
    assert set(extras["gpu"]) & set(extras["cuda"])  # the same versions of cuda-python
