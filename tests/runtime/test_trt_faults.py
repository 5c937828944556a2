from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import engine_sessions
import numpy as np
import pytest
from engine_sessions import (
    CAPACITY,
    PROMPT,
    SAMPLINGS,
    Gpu,
    count_failures,
    cpu_session,
    run_prompt,
    with_engines,
)
from fake_tensorrt import FakeContext

from pass_runtime import GenerateOptions
from pass_runtime.bundle.window import ar_window
from pass_runtime.errors import PassError

gpu, session = engine_sessions.gpu, engine_sessions.session

SLOTS = 2
REQUESTS = [
    (PROMPT, GenerateOptions(12, SAMPLINGS[1], plan="two-pass", ignore_eos=True)),
    (PROMPT[5:], GenerateOptions(9, SAMPLINGS[2], plan="fused", ignore_eos=True)),
]
LONG_REQUESTS = [(PROMPT, GenerateOptions(500, SAMPLINGS[1], plan="ar", ignore_eos=True))] * SLOTS


@pytest.fixture(scope="module")
def engine_bundle(adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(adapter_bundle, tmp_path_factory.mktemp("faults"), 2, SLOTS)


@pytest.fixture(scope="module")
def expected(engine_bundle: Path) -> list[list[int]]:
    cpu = cpu_session(engine_bundle)
    return [cpu.generate_ids(*request).result().token_ids for request in REQUESTS]


@pytest.mark.slow
def test_a_forgotten_session_frees_everything(gpu: Gpu):
    session = gpu.open()
    run_prompt(session, plan="fused")
    del session
    gc.collect()
    gpu.assert_all_freed()


def test_too_little_memory_says_what_to_do(engine_bundle: Path, monkeypatch):
    gpu = Gpu(engine_bundle, monkeypatch, limit=100_000)
    session = gpu.open()
    with pytest.raises(PassError, match=r"GPU has no .* MiB left .*--max-seq-len"):
        run_prompt(session)
    session.close()
    gpu.assert_all_freed()


@pytest.mark.slow
def test_every_execution_may_fail(gpu: Gpu, expected: list[list[int]], caplog):
    failures, uncaptured = [], []  # in each session: requests that fail, graphs not captured
    for number in range(1, 100):
        caplog.clear()
        with gpu.open(max_batch_size=SLOTS) as session:
            gpu.trt.fail_run = number
            message = "failed to run (execute_async_v3: it gave no reason)"
            failures.append(count_failures(session, REQUESTS, expected, message))
            has_failed = gpu.trt.fail_run <= 0
            gpu.trt.fail_run = 0
            uncaptured.append(sum("runs without a CUDA graph" in line for line in caplog.messages))
            assert count_failures(session, REQUESTS, expected, "") == 0
        gpu.assert_all_freed()
        if not has_failed:
            break
    assert not failures.pop() and not uncaptured.pop()  # nothing failed in the last session
    assert len(failures) > 15 and 2 in failures
    assert all(bool(a) != bool(b) for a, b in zip(failures, uncaptured, strict=True))
    assert 0 < sum(map(bool, uncaptured)) < len(uncaptured) / 2 and max(uncaptured) == 1


@pytest.mark.slow
def test_every_allocation_may_fail(gpu: Gpu, expected: list[list[int]]):
    """From the first one, while the session is opened, to the last one of the requests."""
    refused = failed = 0  # how many sessions were not opened, and had requests that failed
    for number in range(1, 300):
        gpu.cuda.fail_malloc = number
        try:
            session = gpu.open(max_batch_size=SLOTS)
        except PassError as error:
            assert "MiB left" in str(error)
            gpu.assert_all_freed()  # although the error refers to the half-open backend
            refused += 1
            continue
        with session:
            failures = count_failures(session, REQUESTS, expected, "MiB left")
            gpu.cuda.fail_malloc = 0
            assert count_failures(session, REQUESTS, expected, "") == 0
        gpu.assert_all_freed()
        if not failures:
            break
        failed += 1
    assert refused == 1 and failed > 30
    assert number == refused + failed + 1


def test_a_context_that_was_bound_in_part_is_bound_again(gpu: Gpu, monkeypatch):
    """Prefill of slot 1 fails after its cache was bound: prefill of slot 0 must not write there."""
    # No pass is captured, as TensorRT-RTX may decide.
    monkeypatch.setattr(FakeContext, "is_stream_capturable", lambda *_: False, raising=False)
    with gpu.open(max_batch_size=SLOTS) as session:
        backend = session.backend
        backend.resize(512, [0, 0])
        backend.set_sampling(0, SAMPLINGS[0])

        def logits_after(tokens: list[int]) -> np.ndarray:
            backend.prefill(0, 0, tokens, 32)
            backend.stage(0, ar_window(), len(tokens), 7)
            backend.run_trunk(ar_window(), 1)
            return backend.logits(ar_window())

        first = logits_after([5, 6, 7])
        other = logits_after([9, 9, 9])
        backend.prefill(0, 0, [1, 2, 3], 32)
        set_address, last_tensor = FakeContext.set_tensor_address, "present_value.1"

        def refuse_last(context: FakeContext, name: str, address: int) -> bool:
            return name != last_tensor and set_address(context, name, address)

        with (
            monkeypatch.context() as patch,
            pytest.raises(PassError, match=f"refuses the address of {last_tensor}"),
        ):
            patch.setattr(FakeContext, "set_tensor_address", refuse_last)
            backend.prefill(1, 0, [9, 9, 9], 32)
        assert np.array_equal(logits_after([5, 6, 7]), first) and not np.array_equal(first, other)


def test_memory_that_runs_out_while_a_sequence_grows_fails_its_request_only(session, gpu):
    long = [2 + i % 300 for i in range(500)]
    options = GenerateOptions(60, SAMPLINGS[1], plan="two-pass", ignore_eos=True)
    session.generate_ids(long, replace(options, max_new_tokens=4)).result()
    assert session.backend.capacity == 512
    session._worker.call(lambda: setattr(gpu.cuda, "fail_malloc", 1))
    stream = session.generate_ids(long, options)
    with pytest.raises(PassError, match="MiB left"):
        list(stream)
    assert stream.token_ids
    again = session.generate_ids(long, options).result()
    assert session.backend.capacity == CAPACITY
    assert again.token_ids[: len(stream.token_ids)] == stream.token_ids
    assert again.token_ids == cpu_session(gpu.bundle).generate_ids(long, options).result().token_ids


@pytest.mark.parametrize("code", [700, 719])
def test_an_error_that_loses_the_device_closes_the_session(gpu: Gpu, code: int):
    """Every request reports the error."""
    session = gpu.open(max_batch_size=SLOTS)
    running = [session.generate_ids(*request) for request in LONG_REQUESTS]
    next(running[0])
    waiting = session.generate_ids(*REQUESTS[0])
    gpu.cuda.sticky_error = code
    error = rf"^the GPU works no more for this process \(CUDA error {code}, .*restart the process$"
    for stream in (*running, waiting):
        with pytest.raises(PassError, match=error):
            stream.result()
        assert stream.finish_reason == "error"
    assert session.closed
    with pytest.raises(PassError, match=error):
        session.generate_ids(*REQUESTS[0])
    session.close()


@pytest.mark.parametrize("code", [2, 46, 900])
def test_other_errors_do_not_close_the_session(gpu: Gpu, expected: list[list[int]], code: int):
    with gpu.open(max_batch_size=SLOTS) as session:
        gpu.cuda.sticky_error = code
        failed = count_failures(session, REQUESTS, expected, "")
        gpu.cuda.sticky_error = 0
        assert failed == SLOTS and not session.closed
        assert count_failures(session, REQUESTS, expected, "") == 0
