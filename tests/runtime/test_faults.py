"""A failure at any moment: the requests it hit report it; all others, and the next, are right."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from faulty import MOMENTS, FaultyBackend, FaultyMemory, Fuse, session_of
from mixed_requests import TEXTS, Alone, Asked
from reciting import assert_idle, reciting_session, runner_of, words

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load
from pass_runtime.backends.memory import HostMemory, KVCache, out_of_memory
from pass_runtime.bundle.read import read_manifest
from pass_runtime.decode import runner as runner_module
from pass_runtime.decode import scheduler as scheduler_module
from pass_runtime.decode.sequence import SequenceState

SEEDED = SamplingParams(0.9, seed=1)
REQUESTS = [
    Asked(TEXTS[1], SamplingParams(), 12, plan="two-pass"),
    Asked(TEXTS[-1], SEEDED, 6, plan="two-pass"),  # it makes the cache grow
    Asked(TEXTS[2], SEEDED, 9, plan="two-pass", logprobs=2),
    Asked(TEXTS[3], SamplingParams(), 5, plan="fused", draft="both"),
]
NEXT = Asked(TEXTS[2], SEEDED, 20, plan="fused")
ERRORS = [MemoryError(), out_of_memory(1 << 20), RuntimeError("the driver said\nsomething odd")]


@pytest.fixture(scope="module")
def alone(tiny_bundle: Path) -> Alone:
    return Alone(load(tiny_bundle, "cpu", threads=1))


def message_of(call) -> str | None:
    """The one line of the PassError that `call` raises; None if it raises none."""
    try:
        call()
    except PassError as error:
        assert len(str(error).splitlines()) == 1 and str(error), repr(error)
        return str(error)
    return None


def assert_serves(session: Session, alone: Alone) -> None:
    alone.assert_same(NEXT, session.generate(NEXT.text, NEXT.options()).result().token_ids)
    assert_idle(session)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["two-pass", "auto"])
@pytest.mark.parametrize("error", ERRORS[:2], ids=["MemoryError", "PassError"])
def test_every_allocation_may_fail(tiny_bundle: Path, alone: Alone, error: Exception, plan: str):
    """Without the prefix cache, a request needs every allocation."""
    for n in itertools.count(1, 1 if plan == "two-pass" else 5):  # `auto` times passes first
        fuse = Fuse(error, n)
        try:
            backend = FaultyBackend(tiny_bundle, memory=FaultyMemory(fuse))
        except PassError:
            continue
        session = session_of(backend, prefix_cache=False)
        asked = [replace(request, plan=plan) for request in REQUESTS[:3]]
        streams = [session.generate(request.text, request.options()) for request in asked]
        failures = [message_of(stream.result) for stream in streams]
        for request, stream, failure in zip(asked, streams, failures, strict=True):
            if failure is not None:
                assert "there is no memory" in failure and "--max-batch-size" in failure
            assert stream.finish_reason == ("length" if failure is None else "error")
            alone.assert_same(request, stream.token_ids, whole=failure is None)
        assert any(failures) == fuse.blown, n
        fuse.at = 0
        assert_serves(session, alone)
        if not fuse.blown:
            return
    raise AssertionError


def test_no_request_fails_if_the_prefix_cache_gets_no_memory(
    tiny_bundle: Path, alone: Alone, monkeypatch
):
    fuse = Fuse(out_of_memory(1 << 20))
    session = session_of(FaultyBackend(tiny_bundle, slots=1, memory=FaultyMemory(fuse)))
    store, failed = runner_of(session)._store, []
    assert store
    save = store.save

    def save_without_memory(slot: int, tokens: list[int], salt: str) -> None:
        fuse.at, fuse.blown = fuse.calls + 1, False
        save(slot, tokens, salt)
        fuse.at = 0
        failed.append(fuse.blown)

    monkeypatch.setattr(store, "save", save_without_memory)
    for asked in (Asked(TEXTS[4], SEEDED, 6, plan="two-pass"), *REQUESTS):
        alone.assert_same(asked, session.generate(asked.text, asked.options()).result().token_ids)
    assert store.used == 0
    assert any(failed)
    assert_serves(session, alone)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_every_run_of_a_graph_may_fail(tiny_bundle: Path, alone: Alone, moment: str, late: bool):
    for n in itertools.count(1):
        backend = FaultyBackend(tiny_bundle)
        session, fuse = session_of(backend), Fuse(RuntimeError("the driver said so"), n)
        backend.fuses[moment], backend.late = fuse, late
        runner, scheduler = runner_of(session), session._worker._scheduler
        prompts = [session.encode(asked.text) for asked in REQUESTS]
        requests = [session.request(p, a.options()) for p, a in zip(prompts, REQUESTS, strict=True)]
        sequences = [SequenceState(request) for request in requests]
        for sequence in sequences:
            scheduler.add(sequence)
        failed: list[SequenceState] = []
        while not scheduler.idle:
            blown, running = fuse.blown, [s for s in sequences if s.finished is None]
            scheduler.step()
            new = [s for s in running if s.finished is not None and s.finished.reason == "error"]
            assert bool(new) == (fuse.blown and not blown)
            assert len(new) <= (1 if moment == "prefill" else len(runner.slots))
            failed += new
        for asked, sequence in zip(REQUESTS, sequences, strict=True):
            tokens = sequence.tokens[len(sequence.request.prompt_ids) :]
            alone.assert_same(asked, tokens, whole=sequence not in failed)
            assert sequence in failed or len(tokens) == asked.tokens
        fuse.at = 0
        assert_serves(session, alone)
        if not fuse.blown:
            assert n > 4 and not failed
            return


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_pass_is_recorded_for_all_of_its_slots_or_for_none(
    tiny_bundle: Path, alone: Alone, number: int, monkeypatch
):
    """If the results of one sequence (`number`) cannot be read, the host's record is as before, so
    that the pass can be repeated and no text changes."""
    session = session_of(FaultyBackend(tiny_bundle, slots=3))
    runner, counted, logprobs = runner_of(session), [], runner_module._logprobs
    run, fuse = runner.run, Fuse(RuntimeError("not to be read"))

    def logprobs_unless_blown(*given):
        fuse.count()
        return logprobs(*given)

    def run_again(plan, drafts):
        before = [(slot.cached, slot in runner.decoding) for slot in runner.slots]
        fuse.at = fuse.calls + 1 + min(number, len(runner.decoding) - 1)
        with pytest.raises(RuntimeError, match="not to be read"):
            run(plan, drafts)
        assert [(slot.cached, slot in runner.decoding) for slot in runner.slots] == before
        counted.append(len(runner.decoding))
        return run(plan, drafts)

    asked = [Asked(text, SEEDED, 8, plan="two-pass", logprobs=1) for text in TEXTS[1:4]]
    for one in asked:
        alone.tokens(one)  # Decoded later, it would count the fuse's calls, too.
    monkeypatch.setattr(runner_module, "_logprobs", logprobs_unless_blown)
    monkeypatch.setattr(runner, "run", run_again)
    streams = session._worker.call(
        lambda: [session.generate(one.text, one.options()) for one in asked]
    )
    for one, stream in zip(asked, streams, strict=True):
        alone.assert_same(one, stream.result().token_ids)
    assert counted.count(3) > 2


@pytest.mark.parametrize("requests", [1, 2])
def test_a_failure_after_a_pass_was_recorded_ends_its_requests(
    tiny_bundle: Path, alone: Alone, requests: int, monkeypatch
):
    """Their tokens were not written yet, so they neither decode nor read a prompt."""
    session = session_of(FaultyBackend(tiny_bundle))
    observe, fuse = scheduler_module._observe, Fuse(RuntimeError("odd"), 3)

    def observe_unless_blown(*given):
        fuse.count()
        observe(*given)

    monkeypatch.setattr(scheduler_module, "_observe", observe_unless_blown)
    options = GenerateOptions(50, ignore_eos=True)
    streams = [session.generate(NEXT.text, options) for _ in range(requests)]
    for stream in streams:
        with pytest.raises(RuntimeError, match="odd"):
            stream.result(timeout=30)
        assert stream.finish_reason == "error"
    assert_serves(session, alone)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_failed_request_raises_where_it_is_read(tiny_bundle: Path, error: Exception):
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
    tiny_bundle: Path, alone: Alone, monkeypatch
):
    session = load(tiny_bundle, "cpu", threads=1, max_batch_size=2)
    streams = [session.generate(asked.text, asked.options()) for asked in (NEXT, NEXT)]
    reader, calls = streams[0]._sequence.text_reader, itertools.count(1)

    def read(token: int):
        if next(calls) == 2:
            raise PassError("no such token")
        return "", None

    monkeypatch.setattr(reader, "read", read)
    assert message_of(streams[0].result) == "no such token"
    alone.assert_same(NEXT, streams[1].result().token_ids)
    assert_serves(session, alone)


def test_an_interrupt_while_reading_leaves_the_session_usable(tiny_bundle: Path):
    session, go = reciting_session(tiny_bundle), threading.Event()
    run = session.backend.run

    def held(kind):
        assert go.wait(20)
        return run(kind)

    session.backend.run = held  # type: ignore[method-assign]
    stream = session.generate_ids([5], GenerateOptions(12, plan="two-pass", ignore_eos=True))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    # In a shell's background jobs SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    go.set()
    assert stream.result().token_ids == [words(position) for position in range(1, 13)]
    again = session.generate_ids([5, 6], GenerateOptions(3, plan="ar")).result()
    assert again.token_ids == [words(2), words(3), words(4)]


@pytest.mark.parametrize("goes_on", [False, True], ids=["close", "go-on"])
@pytest.mark.parametrize("launched", [False, True], ids=["before", "after"])
def test_an_interrupt_while_the_thread_starts_leaves_the_session_usable(
    tiny_bundle: Path, monkeypatch, launched: bool, goes_on: bool
):
    """Ctrl-C comes just before or just after the session's thread begins to run."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "pass-decode":
            return start(thread)
        monkeypatch.setattr(threading.Thread, "start", start)
        if launched:
            start(thread)
        raise KeyboardInterrupt

    options = GenerateOptions(3, plan="ar", ignore_eos=True)
    with load(tiny_bundle, "cpu", threads=1) as session:
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate("a", options)
        if goes_on:
            assert len(session.generate("a", options).result().token_ids) == 3


def test_a_cache_that_cannot_grow_stays_as_it_was(tiny_bundle: Path):
    manifest = read_manifest(tiny_bundle)
    for n in range(1, 2 * manifest.model.layers + 1):
        fuse = Fuse(out_of_memory(5))
        memory = FaultyMemory(fuse)
        cache = KVCache(memory, manifest, 3)
        cache.resize(8, [0, 0, 0])
        size = 3 * manifest.model.kv_heads * 8 * cache.entry_bytes
        places, random = list(cache.addresses()), np.random.default_rng(n)
        contents = random.integers(0, 255, (len(places), size), np.uint8)
        for (_, address), content in zip(places, contents, strict=True):
            memory.upload(address, content)
        fuse.at = fuse.calls + n
        with pytest.raises(PassError):
            cache.resize(16, [8, 3, 0])
        assert (cache.capacity, list(cache.addresses())) == (8, places)
        assert len(memory._blocks) == len(places)
        for (_, address), content in zip(places, contents, strict=True):
            found = np.empty_like(content)
            memory.download(found, address)
            assert (found == content).all()


def test_the_error_for_too_little_memory_says_what_to_do():
    message = r"^there is no memory for \d+\.0 MiB more: .*--capacity.*shorter"
    with pytest.raises(PassError, match=message):
        HostMemory().allocate(1 << 60)
