"""CUDA graphs that ONNX Runtime captures: a run that captures runs the graph several times, every
thread has its own captured graphs, and a graph that cannot be captured runs without."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from engine_sessions import SAMPLINGS, PromptAndOptions, cpu_session, submit_together
from fake_cuda import FakeCuda
from fake_ort_cuda import FakeCaptures
from tokenizers import Tokenizer

from conftest import export_bundle
from pass_runtime import GenerateOptions, SamplingParams, Session
from pass_runtime.backends.cuda import Cuda
from pass_runtime.backends.ort.backend import OrtBackend
from pass_runtime.bundle.manifest import TOKENIZER_FILE
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError

PLANS = ("ar", "two-pass", "fused")
ASKED: list[PromptAndOptions] = [
    (
        [5 + i, 6, 7],
        GenerateOptions(24, sampling, plan=plan, ignore_eos=True, logprobs=i % 2 or None),
    )
    for i, (plan, sampling) in enumerate(product(PLANS, SAMPLINGS))
]
LOGGED = "runs without a CUDA graph"


def open_on(bundle: Path, device: FakeCuda, slots: int = 2) -> Session:
    manifest = read_manifest(bundle)
    options = {"threads": 1, "max_batch_size": slots, "memory": Cuda(device)}
    backend = OrtBackend(bundle, manifest, "cpu", **options)
    return Session(manifest, backend, Tokenizer.from_file(str(bundle / TOKENIZER_FILE)))


@pytest.fixture(scope="module")
def expected(adapter_bundle: Path) -> list[list[int]]:
    return [cpu_session(adapter_bundle).generate_ids(*one).result().token_ids for one in ASKED]


@pytest.fixture
def captures(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> FakeCaptures:
    """Sessions that are opened from now on capture; the expected tokens were written before."""
    return FakeCaptures(monkeypatch)


@pytest.fixture
def session(adapter_bundle: Path, captures: FakeCaptures) -> Iterator[Session]:
    device = FakeCuda()
    with open_on(adapter_bundle, device) as session:
        yield session
    assert not device.allocations and not device.streams


def test_a_run_that_captures_writes_its_tokens_once(
    session: Session, captures: FakeCaptures, expected: list[list[int]]
):
    """Although it runs the tail three times, and each run moves the window on."""
    assert [session.generate_ids(*asked).result().token_ids for asked in ASKED] == expected
    assert captures.replays > 50 and captures.eager == 0
    files = {captures.files[number] for number, _, _ in captures.captured}
    assert session.backend.captures == dict.fromkeys(files) and len(files) > 10
    assert session.backend.uncaptured == {}


def test_captured_batches_write_the_same_tokens(session: Session, expected: list[list[int]]):
    for some in (slice(2), slice(3, 5), slice(6, 8), slice(3)):
        written = [stream.result().token_ids for stream in submit_together(session, ASKED[some])]
        assert written == expected[some]


@pytest.mark.slow
def test_captures_change_no_text_by_rejection(tiny_model: Path, tmp_path: Path, monkeypatch):
    """Its tail overwrites the draft probabilities that it reads. Compared without captures, because
    the rule writes other texts than plain decoding."""
    bundle = export_bundle(tiny_model, tmp_path / "bundle", lookahead=2, rule="rejection")
    options = [
        GenerateOptions(24, SamplingParams(1.0, seed=3), plan=plan, ignore_eos=True)
        for plan in PLANS
    ]

    def written() -> list[list[int]]:
        with open_on(bundle, FakeCuda()) as session:
            return [session.generate_ids([5, 6, 7], one).result().token_ids for one in options]

    expected = written()
    FakeCaptures(monkeypatch)
    assert written() == expected


def test_the_session_runs_all_graphs_in_one_thread(session: Session, captures: FakeCaptures):
    """The decoding thread ends when idle, and captured graphs would be lost with it."""
    for _ in range(2):
        session.generate_ids(*ASKED[0]).result()
    before = len(captures.captured)
    for _ in range(3):
        caller = threading.Thread(target=lambda: session.generate_ids(*ASKED[0]).result())
        caller.start()
        caller.join()
    assert len(captures.captured) == before and len(captures.threads) == 1


@pytest.mark.parametrize("refused", ["trunk", "tail"])
def test_a_failed_capture_fails_no_request(
    session: Session,
    captures: FakeCaptures,
    expected: list[list[int]],
    caplog,
    refused: str,
):
    """What the failed runs overwrote is restored, and the reason is logged."""
    captures.refused = (refused,)
    assert [session.generate_ids(*asked).result().token_ids for asked in ASKED] == expected
    uncaptured = session.backend.uncaptured
    assert uncaptured and all(name.startswith(refused) for name in uncaptured)
    assert all("CUDA failure 901" in why for why in uncaptured.values())
    assert captures.eager > 50 and captures.captured
    logged = [record.message.split(" ")[0] for record in caplog.records if LOGGED in record.message]
    assert sorted(logged) == sorted(uncaptured)


def test_a_device_error_in_a_capture_closes_the_session(
    adapter_bundle: Path, captures: FakeCaptures, monkeypatch
):
    device = FakeCuda()
    session = open_on(adapter_bundle, device)

    def lose(*_given: object) -> None:
        device.sticky_error = 700
        raise RuntimeError("CUDA failure 700: an illegal memory access was encountered")

    monkeypatch.setattr(captures, "run", lose)
    with pytest.raises(PassError, match="CUDA error 700, cudaErrorIllegalAddress"):
        session.generate_ids(*ASKED[0]).result()
    assert session.closed
    session.close()


@pytest.mark.slow
def test_the_thread_for_the_device_ends_with_the_session(
    adapter_bundle: Path, captures: FakeCaptures
):
    def threads() -> int:
        return sum(thread.name == "pass-device" for thread in threading.enumerate())

    gc.collect()
    before = threads()
    with open_on(adapter_bundle, FakeCuda()) as session:
        session.generate_ids(*ASKED[0]).result()
        assert threads() == before + 1
    assert threads() == before
    forgotten = open_on(adapter_bundle, FakeCuda())
    forgotten.generate_ids(*ASKED[0]).result()
    thread = forgotten.backend._thread._thread
    del forgotten
    gc.collect()
    thread.join(60)
    assert threads() == before
