from __future__ import annotations

import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from faulty import MOMENTS, FaultyBackend, FaultyMemory, Fuse, session_of
from mixed_requests import TEXTS, MixedRequest, PlainDecoder
from reciting import assert_idle, engine_of, reciting_session, words

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.backends.memory import HostMemory, out_of_memory
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.tuning.auto import Tuner

SEEDED = SamplingParams(0.9, seed=1)
REQUESTS = [
    MixedRequest(TEXTS[1], SamplingParams(), 12, plan="two-pass"),
    MixedRequest(
        TEXTS[-1], SEEDED, 6, plan="two-pass"
    ),  # a long text, for which the KV cache grows
    MixedRequest(TEXTS[2], SEEDED, 9, plan="two-pass", logprobs=2),
    MixedRequest(TEXTS[3], SamplingParams(), 5, plan="fused", draft="both"),
]
LATER = MixedRequest(TEXTS[2], SEEDED, 20, plan="fused")
ERRORS = [MemoryError(), out_of_memory(1 << 20), RuntimeError("the driver said\nsomething odd")]


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> PlainDecoder:
    return PlainDecoder(load(tiny_bundle, "cpu", threads=1))


def message_of(call) -> str | None:
    """Return the one line of the PassError that `call` raises; None if it raises none."""
    try:
        call()
    except PassError as error:
        assert len(str(error).splitlines()) == 1 and str(error), repr(error)
        return str(error)
    return None


def assert_serves(session: Session, plain: PlainDecoder) -> None:
    plain.assert_same(LATER, session.generate(LATER.text, LATER.options()).result().token_ids)
    assert_idle(session)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["two-pass", "auto"])
@pytest.mark.parametrize("error", ERRORS[:2], ids=["MemoryError", "PassError"])
def test_every_allocation_may_fail(
    tiny_bundle: Path, plain: PlainDecoder, error: Exception, plan: str
):
    """Allocation n fails, for n from 1 until requests need fewer."""
    # With `auto` there are more allocations, since passes are timed: every fifth one fails.
    for n in itertools.count(1, 1 if plan == "two-pass" else 5):
        fuse = Fuse(error, n)
        try:
            backend = FaultyBackend(tiny_bundle, memory=FaultyMemory(fuse))
        except PassError:
            continue
        session = session_of(backend, prefix_cache=False)
        requests = [replace(request, plan=plan) for request in REQUESTS[:3]]
        streams = [session.generate(request.text, request.options()) for request in requests]
        messages = [message_of(stream.result) for stream in streams]
        for request, stream, message in zip(requests, streams, messages, strict=True):
            if message is not None:
                assert "there is no memory" in message and "--max-batch-size" in message
            assert stream.finish_reason == ("length" if message is None else "error")
            plain.assert_same(request, stream.token_ids, whole=message is None)
        # No request fails if passes cannot be timed for `auto`.
        assert any(messages) == fuse.blown or (plan == "auto" and fuse.blown), n
        fuse.at = 0
        assert_serves(session, plain)
        if not fuse.blown:
            return
    raise AssertionError


def test_no_request_fails_if_the_prefix_cache_gets_no_memory(
    tiny_bundle: Path, plain: PlainDecoder, monkeypatch
):
    fuse = Fuse(out_of_memory(1 << 20))
    session = session_of(FaultyBackend(tiny_bundle, slots=1, memory=FaultyMemory(fuse)))
    store, failures = engine_of(session)._store, []
    assert store
    save = store.save

    def save_without_memory(slot: int, tokens: list[int], salt: str) -> None:
        fuse.at, fuse.blown = fuse.calls + 1, False
        save(slot, tokens, salt)
        fuse.at = 0
        failures.append(fuse.blown)

    monkeypatch.setattr(store, "save", save_without_memory)
    for request in (MixedRequest(TEXTS[4], SEEDED, 6, plan="two-pass"), *REQUESTS):
        stream = session.generate(request.text, request.options())
        plain.assert_same(request, stream.result().token_ids)
    assert store.used_bytes == 0
    assert any(failures)
    assert_serves(session, plain)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_run_of_a_graph_may_fail(
    tiny_bundle: Path, plain: PlainDecoder, moment: str, late: bool
):
    """Call n of the method `moment` fails, before it works or after (`late`)."""
    for n in itertools.count(1):
        backend = FaultyBackend(tiny_bundle)
        session, fuse = session_of(backend), Fuse(RuntimeError("the driver said so"), n)
        backend.fuses[moment], backend.late = fuse, late
        engine = engine_of(session)
        sequences = [
            SequenceState(session.request(session.encode(request.text), request.options()))
            for request in REQUESTS
        ]
        for sequence in sequences:
            engine.add(sequence)
        failed: list[SequenceState] = []
        while not engine.idle:
            was_blown, unfinished = fuse.blown, [s for s in sequences if s.finished is None]
            engine.step()
            finished = [s for s in unfinished if s.finished is not None]
            failed_now = [s for s in finished if s.finished.reason == "error"]
            assert bool(failed_now) == (fuse.blown and not was_blown)
            assert len(failed_now) <= (1 if moment == "prefill" else len(engine.slots))
            failed += failed_now
        for request, sequence in zip(REQUESTS, sequences, strict=True):
            tokens = sequence.tokens[len(sequence.request.prompt_ids) :]
            plain.assert_same(request, tokens, whole=sequence not in failed)
            assert sequence in failed or len(tokens) == request.tokens
        fuse.at = 0
        assert_serves(session, plain)
        if not fuse.blown:
            assert n > 4 and not failed
            return


@pytest.mark.parametrize("requests", [1, 2])
def test_a_failure_after_a_pass_was_recorded_ends_its_requests(
    tiny_bundle: Path, plain: PlainDecoder, requests: int, monkeypatch
):
    """The failure comes before the pass's tokens are written, so the requests cannot go on."""
    session = session_of(FaultyBackend(tiny_bundle))
    observe, fuse = Tuner.observe, Fuse(RuntimeError("odd"), 3)

    def observe_with_fuse(*arguments):
        fuse.count()
        observe(*arguments)

    monkeypatch.setattr(Tuner, "observe", observe_with_fuse)
    options = GenerateOptions(50, ignore_eos=True)
    streams = [session.generate(LATER.text, options) for _ in range(requests)]
    for stream in streams:
        with pytest.raises(RuntimeError, match="odd"):
            stream.result(timeout=30)
        assert stream.finish_reason == "error"
    assert_serves(session, plain)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_reading_a_failed_request_raises_its_error_each_time(tiny_bundle: Path, error: Exception):
    backend = FaultyBackend(tiny_bundle)
    backend.fuses["run_trunk"] = Fuse(error, 3)
    session = session_of(backend)
    stream = session.generate([5], GenerateOptions(50, plan="ar", ignore_eos=True))
    expected = RuntimeError if isinstance(error, RuntimeError) else PassError
    with pytest.raises(expected):
        for _ in stream:
            pass
    assert (stream.finish_reason, len(stream.token_ids), stream.done) == ("error", 2, True)
    with pytest.raises(expected):
        stream.result()


def test_a_text_that_cannot_be_decoded_fails_one_request(
    tiny_bundle: Path, plain: PlainDecoder, monkeypatch
):
    session = load(tiny_bundle, "cpu", threads=1, max_batch_size=2)
    streams = [session.generate(LATER.text, LATER.options()) for _ in range(2)]
    reader, calls = streams[0]._sequence.text_reader, itertools.count(1)

    def read(token: int):
        if next(calls) == 2:
            raise PassError("no such token")
        return "", None

    monkeypatch.setattr(reader, "read", read)
    assert message_of(streams[0].result) == "no such token"
    plain.assert_same(LATER, streams[1].result().token_ids)
    assert_serves(session, plain)


def test_an_interrupt_while_reading_leaves_the_session_usable(tiny_bundle: Path):
    session, released = reciting_session(tiny_bundle), threading.Event()
    run = session.backend.run

    def run_when_released(batch):
        assert released.wait(20)
        return run(batch)

    session.backend.run = run_when_released  # type: ignore[method-assign]
    stream = session.generate_ids([5], GenerateOptions(12, plan="two-pass", ignore_eos=True))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    # A shell lets its background jobs ignore SIGINT, and pytest may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    released.set()
    assert stream.result().token_ids == [words(position) for position in range(1, 13)]
    again = session.generate_ids([5, 6], GenerateOptions(3, plan="ar")).result()
    assert again.token_ids == [words(2), words(3), words(4)]


def test_the_error_for_too_little_memory_says_what_to_do():
    message = r"^there is no memory for \d+\.0 MiB more: .*--capacity.*shorter"
    with pytest.raises(PassError, match=message):
        HostMemory().allocate(1 << 60)
