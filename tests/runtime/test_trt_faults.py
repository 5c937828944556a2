"""Failures of a (fake) device: the request reports it, the next is right, all memory is freed."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path

import engine_sessions
import httpx
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
from fastapi import FastAPI

from pass_runtime import GenerateOptions, Session
from pass_runtime.bundle.plan import ar_plan
from pass_runtime.errors import PassError
from pass_server.app import make_app

gpu, session = engine_sessions.gpu, engine_sessions.session

SLOTS = 2
ASKED = [
    (PROMPT, GenerateOptions(12, SAMPLINGS[1], plan="two-pass", ignore_eos=True)),
    (PROMPT[5:], GenerateOptions(9, SAMPLINGS[2], plan="fused", ignore_eos=True)),
]
LONG = [(PROMPT, GenerateOptions(500, SAMPLINGS[1], plan="ar", ignore_eos=True))] * SLOTS


@pytest.fixture(scope="module")
def engine_bundle(adapter_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_engines(adapter_bundle, tmp_path_factory.mktemp("faults"), 2, SLOTS)


@pytest.fixture(scope="module")
def expected(engine_bundle: Path) -> list[list[int]]:
    cpu = cpu_session(engine_bundle)
    return [cpu.generate_ids(*one).result().token_ids for one in ASKED]


@pytest.mark.slow
@pytest.mark.parametrize("closed", [True, False], ids=["closed twice", "forgotten"])
def test_a_session_frees_everything_at_its_end(gpu: Gpu, closed: bool):
    session = gpu.open()
    run_prompt(session, plan="fused")
    if closed:
        session.close()
        session.close()
    else:
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
    """A failure during a capture is only logged; replaying a captured graph executes nothing."""
    failures, eager = [], []
    for number in range(1, 100):
        caplog.clear()
        with gpu.open(max_batch_size=SLOTS) as session:
            gpu.trt.fail_run = number
            message = "failed to run (execute_async_v3: it gave no reason)"
            failures.append(count_failures(session, ASKED, expected, message))
            reached = gpu.trt.fail_run <= 0
            gpu.trt.fail_run = 0
            eager.append(sum("runs without a CUDA graph" in line for line in caplog.messages))
            assert count_failures(session, ASKED, expected, "") == 0
        gpu.assert_all_freed()
        if not reached:
            break
    assert not failures.pop() and not eager.pop()  # the last time, all succeeded
    assert len(failures) > 15 and 2 in failures
    assert all(bool(failed) != bool(logged) for failed, logged in zip(failures, eager, strict=True))
    assert 0 < sum(map(bool, eager)) < len(eager) / 2 and max(eager) == 1


@pytest.mark.slow
def test_every_allocation_may_fail(gpu: Gpu, expected: list[list[int]]):
    """From the first one, while the session is opened, to the last one of a batch."""
    refused = failed = 0
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
            failures = count_failures(session, ASKED, expected, "MiB left")
            gpu.cuda.fail_malloc = 0
            assert count_failures(session, ASKED, expected, "") == 0
        gpu.assert_all_freed()
        if not failures:
            break
        failed += 1
    assert refused == 1 and failed > 30
    assert number == refused + failed + 1


def test_a_half_bound_context_is_bound_again(gpu: Gpu, monkeypatch):
    """Prefill of slot 1 fails after its cache was bound: prefill of slot 0 must not write there."""
    # TensorRT-RTX may say so.
    monkeypatch.setattr(FakeContext, "is_stream_capturable", lambda *_: False, raising=False)
    with gpu.open(max_batch_size=SLOTS) as session:
        backend = session.backend
        backend.resize(512, [0, 0])
        backend.set_sampling(0, SAMPLINGS[0])

        def logits_behind(tokens: list[int]) -> np.ndarray:
            backend.prefill(0, 0, tokens, 32)
            backend.stage(0, ar_plan(), len(tokens), 7)
            backend.run_trunk(ar_plan(), 1)
            return backend.logits(ar_plan())

        first = logits_behind([5, 6, 7])
        other = logits_behind([9, 9, 9])
        backend.prefill(0, 0, [1, 2, 3], 32)
        set_address, last = FakeContext.set_tensor_address, "present_value.1"
        with (
            monkeypatch.context() as patch,
            pytest.raises(PassError, match=f"refuses the address of {last}"),
        ):
            patch.setattr(
                FakeContext,
                "set_tensor_address",
                lambda *given: given[1] != last and set_address(*given),
            )
            backend.prefill(1, 0, [9, 9, 9], 32)
        assert np.array_equal(logits_behind([5, 6, 7]), first) and not np.array_equal(first, other)


def test_memory_that_runs_out_while_a_sequence_grows(session: Session, gpu: Gpu):
    """The request fails, and succeeds when it is repeated: larger columns need new memory."""
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


@pytest.mark.slow
def test_a_thousand_generations_leave_memory_flat(session: Session, gpu: Gpu):
    kinds = [(sampling, plan) for sampling in SAMPLINGS for plan in ("ar", "two-pass", "fused")]
    first = [run_prompt(session, *kind, count=4).token_ids for kind in kinds for _ in range(3)][::3]
    before = gpu.counts()
    for number in range(1000):
        at = number % len(kinds)
        assert run_prompt(session, *kinds[at], count=4).token_ids == first[at]
    assert gpu.counts() == before


@pytest.mark.parametrize("code", [700, 719])
def test_an_error_that_loses_the_device_closes_the_session(gpu: Gpu, code: int):
    """Every request and the health check report it; after a single failure the session goes on."""
    session = gpu.open(max_batch_size=SLOTS)
    app = make_app(session)
    assert get(app, "/health") == 200
    running = [session.generate_ids(*one) for one in LONG]
    next(running[0])
    waiting = session.generate_ids(*ASKED[0])
    gpu.cuda.sticky_error = code
    lost = rf"^the GPU works no more for this process \(CUDA error {code}, .*restart the process$"
    for stream in (*running, waiting):
        with pytest.raises(PassError, match=lost):
            stream.result()
        assert stream.finish_reason == "error"
    assert session.closed
    with pytest.raises(PassError, match=lost):
        session.generate_ids(*ASKED[0])
    assert get(app, "/health") == get(app, "/ready") == 503
    session.close()
    session.close()


def get(app: FastAPI, path: str) -> int:
    async def ask() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get(path)).status_code

    return asyncio.run(ask())


@pytest.mark.parametrize("code", [2, 46, 900])
def test_other_errors_close_nothing(gpu: Gpu, expected: list[list[int]], code: int):
    with gpu.open(max_batch_size=SLOTS) as session:
        gpu.cuda.sticky_error = code
        failed = count_failures(session, ASKED, expected, "")
        gpu.cuda.sticky_error = 0
        assert failed == SLOTS and not session.closed
        assert count_failures(session, ASKED, expected, "") == 0
