"""CUDA graphs that ONNX Runtime captures: a run that captures runs the graph several times, every
thread has its own captured graphs, and a graph that cannot be captured runs uncaptured."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from engine_sessions import (
    SAMPLINGS,
    PromptAndOptions,
    cpu_session,
    ort_session_on,
    submit_together,
)
from fake_cuda import FakeCuda
from fake_ort_cuda import FakeCaptures

from conftest import export_bundle
from pass_runtime import GenerateOptions, SamplingParams, Session
from pass_runtime.errors import PassError

PLANS = ("ar", "two-pass", "fused")
REQUESTS: list[PromptAndOptions] = [
    (
        [5 + i, 6, 7],
        GenerateOptions(24, sampling, plan=plan, ignore_eos=True, logprobs=i % 2 or None),
    )
    for i, (plan, sampling) in enumerate(product(PLANS, SAMPLINGS))
]


@pytest.fixture(scope="module")
def expected(adapter_bundle: Path) -> list[list[int]]:
    session = cpu_session(adapter_bundle)
    return [session.generate_ids(*request).result().token_ids for request in REQUESTS]


@pytest.fixture
def captures(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    return FakeCaptures(monkeypatch)


@pytest.fixture
def session(adapter_bundle: Path, captures: FakeCaptures) -> Iterator[Session]:
    device = FakeCuda()
    with ort_session_on(device, adapter_bundle) as session:
        yield session
    assert not device.allocations and not device.streams


def test_a_run_that_captures_writes_its_tokens_once(session, captures, expected):
    """Such a run runs the tail three times, and each time the tail moves the window on."""
    assert [session.generate_ids(*each).result().token_ids for each in REQUESTS] == expected
    assert captures.replays > 50 and captures.eager == 0
    files = {captures.files[number] for number, _, _ in captures.captured}
    assert session.backend.captures == dict.fromkeys(files) and len(files) > 10
    assert session.backend.uncaptured == {}


def test_captured_batches_write_the_same_tokens(session: Session, expected: list[list[int]]):
    for batch in (slice(2), slice(3, 5), slice(6, 8), slice(3)):
        streams = submit_together(session, REQUESTS[batch])
        assert [stream.result().token_ids for stream in streams] == expected[batch]


@pytest.mark.slow
def test_captures_change_no_token_with_the_rejection_rule(tiny_model, tmp_path, monkeypatch):
    bundle = export_bundle(tiny_model, tmp_path / "bundle", lookahead=2, rule="rejection")
    options = [
        GenerateOptions(24, SamplingParams(1.0, seed=3), plan=plan, ignore_eos=True)
        for plan in PLANS
    ]

    def written() -> list[list[int]]:
        with ort_session_on(FakeCuda(), bundle) as session:
            return [session.generate_ids([5, 6, 7], each).result().token_ids for each in options]

    expected = written()
    FakeCaptures(monkeypatch)
    assert written() == expected


def test_the_session_runs_all_graphs_in_one_thread(session: Session, captures: FakeCaptures):
    for _ in range(2):
        session.generate_ids(*REQUESTS[0]).result()
    before = len(captures.captured)
    for _ in range(3):
        caller = threading.Thread(target=lambda: session.generate_ids(*REQUESTS[0]).result())
        caller.start()
        caller.join()
    assert len(captures.captured) == before and len(captures.threads) == 1


@pytest.mark.parametrize("refused", ["trunk", "tail"])
def test_a_failed_capture_fails_no_request(session, captures, expected, caplog, refused):
    """What the failed runs overwrote is restored, and the reason is logged."""
    captures.refused = (refused,)
    assert [session.generate_ids(*each).result().token_ids for each in REQUESTS] == expected
    uncaptured = session.backend.uncaptured
    assert uncaptured and all(name.startswith(refused) for name in uncaptured)
    assert all("CUDA failure 901" in reason for reason in uncaptured.values())
    assert captures.eager > 50 and captures.captured
    lines = [line for line in caplog.messages if "runs without a CUDA graph" in line]
    assert sorted(line.split(" ")[0] for line in lines) == sorted(uncaptured)


def test_a_device_error_in_a_capture_closes_the_session(adapter_bundle, captures, monkeypatch):
    device = FakeCuda()
    session = ort_session_on(device, adapter_bundle)

    def lose_device(*_arguments: object) -> None:
        device.sticky_error = 700
        raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

    monkeypatch.setattr(captures, "run", lose_device)
    with pytest.raises(PassError, match="CUDA error 700, cudaErrorIllegalAddress"):
        session.generate_ids(*REQUESTS[0]).result()
    assert session.closed
    session.close()
