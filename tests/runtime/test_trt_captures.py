from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import engine_sessions
import numpy as np
import pytest
from engine_sessions import (
    PROMPT,
    SAMPLINGS,
    Gpu,
    assert_cpu_writes,
    assert_cpu_writes_all,
    run_prompt,
    submit_together,
    with_engines,
)
from fake_cuda import Code, FakeCuda
from fake_tensorrt import FakeContext

from pass_runtime import Constraint, GenerateOptions, SamplingParams
from pass_runtime.backends.base import Batch
from pass_runtime.backends.cuda import DEVICE_LOST_ERRORS, Cuda
from pass_runtime.backends.trt.backend import RUNTIME_CACHE_FILE
from pass_runtime.bundle.window import ar_window
from pass_runtime.errors import PassError

gpu = engine_sessions.gpu

SLOTS = 4
GREEDY = SamplingParams()
REQUESTS = [
    ([2 + i, *PROMPT[i:]], GenerateOptions(9 + 3 * i, SAMPLINGS[i % 3], plan=plan, ignore_eos=True))
    for i, plan in enumerate(("ar", "fused", "two-pass", "ar", "fused"))
]


@pytest.fixture(scope="module", params=["tensorrt", "tensorrt-rtx"])
def engine_bundle(request, adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("captures")
    return with_engines(adapter_bundle, directory, 2, SLOTS, request.param)


def test_batches_that_take_turns_are_replayed(gpu: Gpu):
    """1, 2 and 4 sequences run in one profile's range of batches; prompts go into every slot."""
    with gpu.open(max_batch_size=SLOTS) as session:
        for count in (1, 4, 2, 1, 4, 2, 1, 4, 2, 1):
            batch = REQUESTS[:count]
            assert_cpu_writes_all(session, gpu.bundle, batch)
        assert gpu.cuda.launches > 50


def test_requests_with_and_without_processors_in_a_batch(gpu: Gpu):
    changes = [
        {"constraint": Constraint(regex="[a-z ]{4,60}"), "ignore_eos": False},
        {"sampling": SamplingParams(0.9, seed=3, frequency_penalty=0.8, repetition_penalty=1.2)},
        {"draft": "both", "logprobs": 2},
        {"sampling": SamplingParams(logit_bias={5: 3.0, 9: -4.0}), "bad_words": ("the",)},
    ]
    batch = [
        (prompt, replace(options, plan="fused", **change))
        for (prompt, options), change in zip(REQUESTS[:4], changes, strict=True)
    ]
    with gpu.open(max_batch_size=SLOTS) as session:
        for _ in range(2):
            assert_cpu_writes_all(session, gpu.bundle, batch)
        assert not session.backend.uncaptured and gpu.cuda.captures


def test_all_engines_share_one_block_of_scratch_memory(gpu: Gpu, monkeypatch):
    """A larger block takes its place if an engine that is loaded later needs more."""
    blocks: list[tuple[int, int]] = []  # (address, size), for each context
    set_memory = FakeContext.set_device_memory

    def recorded(context: FakeContext, address: int, size: int) -> None:
        blocks.append((address, size))
        set_memory(context, address, size)

    monkeypatch.setattr(FakeContext, "set_device_memory", recorded)
    with gpu.open(max_batch_size=SLOTS) as session:
        run_prompt(session, plan="two-pass")
        assert len(blocks) > 3 and len(set(blocks)) == 1
        gpu.trt.scratch = 1 << 16
        run_prompt(session, SAMPLINGS[1], plan="two-pass")
        assert len(set(blocks)) == 2
        run_prompt(session, plan="two-pass")
    gpu.assert_all_freed()


@pytest.mark.parametrize(
    "function", ["cudaStreamBeginCapture", "cudaStreamEndCapture", "cudaGraphInstantiate"]
)
def test_a_failed_capture_fails_no_request(gpu: Gpu, function: str, caplog):
    with gpu.open(max_batch_size=SLOTS) as session:
        gpu.cuda.fail_capture = function
        for _ in range(3):
            assert_cpu_writes_all(session, gpu.bundle, REQUESTS)
        assert gpu.cuda.captures == gpu.cuda.launches == 0
        lines = [line for line in caplog.messages if "runs without a CUDA graph" in line]
        assert len(lines) == len(set(lines)) > 5
        assert all(f"{function} failed with CUDA error 901" in line for line in lines)
        assert any(line.startswith("pass ar 4 ") for line in lines)
        names = {line.split(" runs without")[0] for line in lines}
        assert names == set(session.backend.uncaptured)
        gpu.cuda.fail_capture = ""
        run_prompt(session, plan="two-pass", logprobs=1)  # a pass with logprobs is new
        assert gpu.cuda.captures > 0
    gpu.assert_all_freed()


def test_a_device_error_in_a_capture_closes_the_session(gpu: Gpu, monkeypatch):
    def lose_device(cuda: FakeCuda, _stream: int, _mode: int) -> tuple[int]:
        cuda.sticky_error = 719
        return (Code(719),)

    monkeypatch.setattr(FakeCuda, "cudaStreamBeginCapture", lose_device)
    session = gpu.open(max_batch_size=SLOTS)
    error = (
        r"CUDA error 719, cudaErrorLaunchFailure, cudaStreamBeginCapture\); restart the process$"
    )
    with pytest.raises(PassError, match=error):
        run_prompt(session)
    assert session.closed


def test_the_messages_of_a_library_that_refuses_a_call_are_logged(gpu: Gpu, caplog):
    functions = {
        "deserialize_cuda_engine": "cannot be loaded",
        "create_execution_context": "gets no execution context",
        "set_optimization_profile_async": "does not take profile",
        "set_input_shape": "refuses shape",
        "set_tensor_address": "refuses the address of",
        "execute_async_v3": "failed to run",
    }
    for function, words in functions.items():
        caplog.clear()
        gpu.trt.refuses = {function}
        expected = rf"{words}.*\({function}: \[{function}\.cpp::7\] Error Code 3: of a kind\)"
        with (
            pytest.raises(PassError, match=expected) as raised,
            gpu.open(max_batch_size=SLOTS) as session,
        ):
            run_prompt(session)
        assert "\n" not in str(raised.value)
        levels = {
            record.levelno: record.message
            for record in caplog.records
            if record.name == "pass_runtime.backends"
        }
        name = gpu.trt.__name__
        assert levels[logging.ERROR] == f"{name}: [{function}.cpp::7] Error Code 3: of a kind"
        assert levels[logging.WARNING] == f"{name}: {function} has been asked for"


def test_a_failure_that_the_library_does_not_explain_names_cudas_error(gpu: Gpu, monkeypatch):
    def fail(context: FakeContext, _stream: int) -> bool:
        context.cuda.failed(2)  # type: ignore[arg-type]
        return False

    with gpu.open() as session:
        expected = run_prompt(session).token_ids
        with (
            monkeypatch.context() as patch,
            pytest.raises(PassError, match=r"\(execute_async_v3: CUDA error 2 \("),
        ):
            patch.setattr(FakeContext, "execute_async_v3", fail)
            run_prompt(session, SAMPLINGS[1])
        assert run_prompt(session).token_ids == expected


def test_cudas_last_error_is_reset_after_a_failure(gpu: Gpu):
    """Otherwise the next call would report the old error as its own."""
    cuda = Cuda(gpu.cuda)
    gpu.cuda.limit = 1000
    for fail in (lambda: cuda.allocate(1 << 20), lambda: cuda.capture(cuda.synchronize)):
        message = r"(cudaMalloc|cudaStreamSynchronize) failed with CUDA error"
        with pytest.raises(PassError, match=message):
            fail()
        assert gpu.cuda.error == 0 and gpu.cuda.capturing is None
    cuda.close()


def test_the_errors_that_lose_the_device_are_those_of_cudas_documentation():
    errors = pytest.importorskip("cuda.bindings.runtime").cudaError_t
    documented = {int(e) for e in errors if "must be terminated" in (e.__doc__ or "")}
    if not documented:
        pytest.skip("this cuda-python has no documentation of errors")
    assert documented <= DEVICE_LOST_ERRORS <= {int(error) for error in errors}


def test_the_host_waits_for_the_device_once_in_each_pass(gpu: Gpu, monkeypatch):
    """It does not wait for the windows that it writes before the pass, which must all arrive."""
    waits: list[int] = []
    synchronize = FakeCuda.cudaStreamSynchronize

    def recorded(cuda: FakeCuda, stream: int) -> tuple[int]:
        waits.append(stream)
        return synchronize(cuda, stream)

    monkeypatch.setattr(FakeCuda, "cudaStreamSynchronize", recorded)
    with gpu.open(max_batch_size=SLOTS) as session:
        backend, kind = session.backend, Batch(ar_window(), SLOTS, "greedy")
        backend.resize(512, [0] * SLOTS)
        for slot in range(SLOTS):
            backend.set_sampling(slot, SAMPLINGS[0])

        def run_after(root: int) -> list[list[int]]:
            for slot in range(SLOTS):
                backend.stage(slot, ar_window(), 5 + slot, root + slot)
            return backend.run(kind).tokens

        first = run_after(7)
        for _ in range(3):
            run_after(90)
        waits.clear()
        assert run_after(7) == first and len(waits) == 1
        assert run_after(90) != first and len(waits) == 2
        backend.logits(ar_window(), SLOTS)
        assert len(waits) == 3


def test_uploads_of_any_size_arrive_in_order(gpu: Gpu):
    """Those of more than the staging memory, here 256 bytes, too."""
    cuda = Cuda(gpu.cuda, staging_bytes=256)
    address = cuda.allocate(1 << 12)
    for size in (8, 100, 256, 257, 1 << 12):
        for value in range(5):
            cuda.upload(address, np.full(size, value, np.uint8))
            if size <= 256:
                cuda.upload(address + 256, np.full(size, value + 9, np.uint8))
        downloaded = np.zeros(size, np.uint8)
        cuda.download(downloaded, address)
        assert (downloaded == 4).all()
    cuda.close()


@pytest.mark.slow
def test_after_a_warm_up_no_request_waits_for_a_capture(gpu: Gpu):
    requests = [(prompt, replace(each, sampling=GREEDY)) for prompt, each in REQUESTS]
    long_prompt = [7 + i % 90 for i in range(560)]
    with gpu.open(max_batch_size=SLOTS) as session:
        session.warm_up(GREEDY)
        captures, contexts = gpu.cuda.captures, gpu.trt.contexts
        assert captures > 20
        # It is written at once, so that a killed process keeps it too.
        assert cache_file(gpu).exists() == gpu.library.compiles_kernels
        session.warm_up(GREEDY)
        for batch in (requests[:1], requests, [(long_prompt, requests[1][1])]):
            assert_cpu_writes_all(session, gpu.bundle, batch)
        assert (gpu.cuda.captures, gpu.trt.contexts) == (captures, contexts)
        streams = submit_together(session, requests)
        session.warm_up(GREEDY)  # while requests decode, whose text stays the same
        for request, stream in zip(requests, streams, strict=True):
            assert_cpu_writes(gpu.bundle, request, stream.result().token_ids)
    gpu.assert_all_freed()


def cache_file(gpu: Gpu) -> Path:
    return gpu.manifest.engines[0].path(gpu.bundle) / RUNTIME_CACHE_FILE


class TestRuntimeCache:
    """TensorRT-RTX stores the kernels that it compiles in a file beside the engines."""

    @pytest.fixture
    def path(self, gpu: Gpu) -> Path:
        if not gpu.library.compiles_kernels:
            pytest.skip("TensorRT compiles kernels when it builds the engines")
        path = cache_file(gpu)
        path.unlink(missing_ok=True)
        return path

    def count_compiled(self, gpu: Gpu) -> int:
        gpu.trt.compiled = 0
        with gpu.open() as session:
            run_prompt(session, plan="two-pass")
        return gpu.trt.compiled

    def test_the_next_process_compiles_nothing(self, gpu: Gpu, path: Path):
        for is_there in (False, True):
            if is_there:
                path.write_bytes(b"no cache of this library")  # it is replaced
            assert self.count_compiled(gpu) > 3
            written = path.stat().st_mtime_ns
            assert self.count_compiled(gpu) == 0
            assert path.stat().st_mtime_ns == written  # nothing new, nothing written
            assert not list(path.parent.glob(f".{path.name}*"))

    def test_without_a_writable_cache_kernels_are_compiled_again(self, gpu: Gpu, path: Path):
        path.mkdir()
        try:
            assert [self.count_compiled(gpu) > 3 for _ in range(2)] == [True, True]
        finally:
            path.rmdir()

    def test_the_cache_is_not_written_after_the_device_is_lost(self, gpu: Gpu, path: Path):
        session = gpu.open()
        run_prompt(session)
        gpu.cuda.sticky_error = 700
        with pytest.raises(PassError, match="works no more"):
            run_prompt(session)
        session.close()
        assert not path.exists()

    @pytest.mark.usefixtures("path")
    def test_a_pass_that_the_library_calls_uncapturable_is_not_captured(self, gpu: Gpu, caplog):
        gpu.trt.refuses = {"is_stream_capturable"}
        assert self.count_compiled(gpu) > 3
        assert gpu.cuda.captures == 0
        assert any(line.endswith("is_stream_capturable says no") for line in caplog.messages)
