"""ONNX Runtime on CUDA memory, as with `--device cuda`; the fake device's memory is the host's."""

from __future__ import annotations

import gc
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_sessions import SAMPLINGS, Asked, assert_cpu_writes, cpu_session, submit_together
from fake_gpu import FakeCuda
from tokenizers import Tokenizer

from pass_runtime import GenerateOptions, Session
from pass_runtime.backends.cuda import Cuda, import_api, why_no_device
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.backends.ort.engine import open_memory
from pass_runtime.bundle.manifest import TOKENIZER_FILE
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError

LONG = [2 + i % 300 for i in range(500)]
ASKED: list[Asked] = [
    ([5, 6, 7], GenerateOptions(30, SAMPLINGS[1], plan="fused", ignore_eos=True)),
    # The KV capacity grows to 512.
    (LONG[:200], GenerateOptions(100, SAMPLINGS[2], plan="two-pass", ignore_eos=True)),
    (LONG[:40], GenerateOptions(20, SAMPLINGS[0], plan="ar", ignore_eos=True)),
]
Open = Callable[[FakeCuda], Session]


@pytest.fixture
def open_on(adapter_bundle: Path) -> Open:
    def open_on(device: FakeCuda) -> Session:
        manifest = read_manifest(adapter_bundle)
        backend = OrtBackend(
            adapter_bundle, manifest, "cpu", threads=1, max_batch_size=2, memory=Cuda(device)
        )
        return Session(manifest, backend, Tokenizer.from_file(str(adapter_bundle / TOKENIZER_FILE)))

    return open_on


@pytest.fixture(scope="module")
def expected(adapter_bundle: Path) -> list[list[int]]:
    return [cpu_session(adapter_bundle).generate_ids(*one).result().token_ids for one in ASKED]


def attempt(session: Session, expected: list[list[int]]) -> int:
    """Run all of ASKED and return how many failed; the others wrote the expected tokens."""
    failed = 0
    for stream, right in zip(submit_together(session, ASKED), expected, strict=True):
        try:
            assert stream.result().token_ids == right
        except PassError as error:
            assert "MiB left" in str(error) and stream.token_ids == right[: len(stream.token_ids)]
            failed += 1
    return failed


def test_device_memory_holds_what_the_hosts_does(adapter_bundle: Path, open_on: Open):
    """Growing moves what is cached; so does a smaller batch."""
    device = FakeCuda()
    with open_on(device) as session:
        for _ in range(2):
            for one, stream in zip(ASKED, submit_together(session, ASKED), strict=True):
                assert_cpu_writes(adapter_bundle, one, stream.result().token_ids)
        assert device.mallocs > len(device.blocks)  # some were given back
    assert not device.blocks and not device.streams


def test_a_forgotten_session_gives_device_memory_back(open_on: Open):
    device = FakeCuda()
    session = open_on(device)
    session.generate_ids(*ASKED[0]).result()
    assert device.blocks
    del session
    gc.collect()
    assert not device.blocks and not device.streams


def test_every_allocation_may_fail(open_on: Open, expected: list[list[int]]):
    failed = 0
    for number in range(1, 200, 5):
        device = FakeCuda()
        with open_on(device) as session:
            device.fail_malloc = number
            now = attempt(session, expected)
            assert device.fail_malloc <= 0 or not now
            device.fail_malloc = 0
            assert attempt(session, expected) == 0
        assert not device.blocks and not device.streams
        failed += bool(now)
        if not now:
            break
    assert failed > 10 and not now


def test_a_cache_that_cannot_grow_is_what_it_was(open_on: Open, expected: list[list[int]]):
    """There is room for 256 columns, and not for 256 and 512 at a time."""
    device = FakeCuda()
    with open_on(device) as session:
        session.generate_ids(*ASKED[0]).result()
        device.limit = device.used + 450_000
        stream = session.generate_ids(*ASKED[1])
        with pytest.raises(PassError, match=r"GPU has no .* MiB left"):
            stream.result()
        assert (
            0 < len(stream.token_ids) < 100
            and stream.token_ids == expected[1][: len(stream.token_ids)]
        )
        assert session.backend.capacity == 256
        assert session.generate_ids(*ASKED[2]).result().token_ids == expected[2]
        device.limit = 1 << 30
        assert session.generate_ids(*ASKED[1]).result().token_ids == expected[1]


def test_without_cuda_python_the_command_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for attempt in (import_api, lambda: open_memory("cuda")):
        with pytest.raises(
            PassError, match=r"cannot be imported .*; run: pip install cuda-python$"
        ):
            attempt()


def driver_of(driver: int, library: int = 13040) -> SimpleNamespace:
    """cuda.bindings.runtime with a driver that is too old, or 0 for none: both are error 35."""
    return SimpleNamespace(
        cudaGetDeviceCount=lambda: (35, None),
        cudaDriverGetVersion=lambda: (0, driver),
        cudaRuntimeGetVersion=lambda: (0, library),
        cudaGetDevice=lambda: (0, 0),
        cudaStreamCreateWithFlags=lambda _: (35, None),
        cudaGetLastError=lambda: (35,),
    )


def test_an_old_driver_is_named_with_what_is_needed():
    told = why_no_device(driver_of(12040))
    assert "runs CUDA up to 12.4, and the library is CUDA 13.4" in told
    assert "a driver for CUDA 13, 580 or newer" in told and "install" not in told.replace(
        "installed", ""
    )
    assert "a driver for CUDA 12, 525 or newer" in why_no_device(driver_of(11080, 12090))
    with pytest.raises(
        PassError, match=r"cudaStreamCreateWithFlags .* up to 12\.4, .* 580 or newer"
    ):
        Cuda(driver_of(12040))


def test_no_driver_is_not_an_old_one():
    told = why_no_device(driver_of(0))
    assert "there is no NVIDIA driver" in told and "older" not in told
    nothing = SimpleNamespace(cudaGetDeviceCount=lambda: (0, 0))
    assert "CUDA_VISIBLE_DEVICES" in why_no_device(nothing)


def test_the_gpu_extra_holds_what_the_device_needs():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    names = {re.split("[<>=]", requirement)[0] for requirement in extras["gpu"]}
    assert names == {"onnxruntime-gpu[cuda,cudnn]", "cuda-python"}
    assert set(extras["gpu"]) & set(extras["cuda"])  # the same versions of it
