"""A request's text does not depend on its neighbours, its slot, its time or its plan.

The tests call the scheduler's steps, so that they can choose and repeat every interleaving.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from machines import times_of
from manifests import named_bundle
from mixed_requests import PLANS, SAMPLING, STOPS, TEXTS, Alone, Asked, requests
from reciting import assert_idle, watch_capacity

from pass_runtime import Session, load
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import Piece, SequenceState
from pass_runtime.text.detokenizer import TextStream
from pass_runtime.tuning import tuner as tuner_module
from pass_runtime.tuning.estimates import PassTimes
from pass_runtime.tuning.tuner import Tuner

SLOTS = (1, 3, 8)
TIMES = {
    "free rows": times_of({1: 1.0, 64: 1.0}),
    "rows at a price": times_of({1: 1.0, 64: 4.0}, lambda rows: 0.1 * (rows - 1) / 16),
    "dear rows": times_of({1: 1.0, 64: 64.0}),
}


class FixedTuners:
    """In the place of `Tuners`: given pass times, so that `auto` always decides the same."""

    def __init__(self, session: Session, times: PassTimes) -> None:
        lookahead = session.manifest.lookahead.length
        self._tuners = {
            sampler: Tuner(times, lookahead, (0.6, 0.5, 0.3))
            for sampler in ("greedy", "sample", "truncated")
        }
        self._asked: set[tuple[str, int]] = set()

    def is_timed(self, sampler, batch):
        return (sampler, batch) in self._asked

    def get(self, sampler, batch=1):
        self._asked.add((sampler, batch))
        return self._tuners[sampler]


class Batches(RuleBasedStateMachine):
    """Requests begin, are decoded for some steps, and are cancelled, in any order."""

    def __init__(self, sessions: dict[int, Session], alone: Alone) -> None:
        super().__init__()
        self.sessions, self.alone = sessions, alone
        self.asked: list[tuple[Asked, SequenceState]] = []

    @initialize(slots=st.sampled_from(SLOTS), times=st.sampled_from(sorted(TIMES)))
    def open(self, slots, times):
        self.session = self.sessions[slots]
        backend = self.session.backend
        backend.resize(backend.capabilities.capacities[0], [0] * slots)
        self.runner = Runner(backend)  # the buffers hold what the last example left
        self.scheduler = Scheduler(self.runner, FixedTuners(self.session, TIMES[times]), 100)

    @rule(asked=requests())
    def submit(self, asked):
        ids, options = self.session.encode(asked.text), asked.options()
        reader = TextStream(self.session.tokenizer, ids, options.stop_strings)
        sequence = SequenceState(self.session.request(ids, options), reader)
        self.scheduler.reserve(1)
        self.scheduler.add(sequence)
        self.asked.append((asked, sequence))

    @rule(count=st.integers(1, 6))
    def decode(self, count):
        for _ in range(count):
            self.scheduler.step()

    @rule(data=st.data())
    def cancel(self, data):
        if self.asked:
            data.draw(st.sampled_from([sequence for _, sequence in self.asked])).cancelled = True

    @invariant()
    def every_request_waits_or_has_a_slot(self):
        if not self.asked:
            return
        held = [slot.sequence for slot in self.runner.busy] + list(self.scheduler.waiting)
        assert len(set(map(id, held))) == len(held)
        unfinished = {id(sequence) for _, sequence in self.asked if sequence.finished is None}
        assert set(map(id, held)) == unfinished

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if self.scheduler.idle:
                break
            self.scheduler.step()
        assert self.scheduler.idle and not self.runner.busy
        for asked, sequence in self.asked:
            tokens = sequence.tokens[len(sequence.request.prompt_ids) :]
            assert sequence.finished is not None
            cancelled = sequence.finished.reason == "cancelled"
            assert cancelled or sequence.finished.reason in ("stop", "length")
            assert sequence.cancelled or not cancelled
            self.alone.assert_same(asked, tokens, whole=not cancelled)
            self.check_events(asked, sequence, tokens)

    def check_events(self, asked, sequence, tokens):
        events = []
        while not sequence.events.empty():
            events.append(sequence.events.get())
        assert events.pop() is sequence.finished
        assert all(isinstance(event, Piece) for event in events)
        written = [token for event in events for token in event.tokens]
        assert [token.id for token in written] == tokens
        for token in written:
            assert (token.logprobs is not None) == (asked.logprobs is not None)
            assert token.logprobs is None or len(token.logprobs.top) == asked.logprobs


@pytest.fixture(scope="module", params=["tiny_bundle", "adapter_bundle", "int4"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return named_bundle(request)


@pytest.fixture(scope="module")
def alone(bundle: Path) -> Alone:
    return Alone(load(bundle, "cpu", threads=1))


@pytest.fixture(scope="module")
def sessions(bundle: Path) -> Iterator[dict[int, Session]]:
    options = {"threads": 1, "verify": False}
    opened = {slots: load(bundle, "cpu", max_batch_size=slots, **options) for slots in SLOTS}
    for session in opened.values():
        watch_capacity(session.backend)
    yield opened
    for session in opened.values():
        session.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_interleaving_changes_a_text(sessions: dict[int, Session], alone: Alone, monkeypatch):
    # Decide as often as possible, whatever time that takes.
    monkeypatch.setattr(tuner_module, "DECISION_TIME_SHARE", 1e9)
    run_state_machine_as_test(
        partial(Batches, sessions, alone),
        settings=settings(
            max_examples=36,
            stateful_step_count=24,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def some_requests(count: int) -> list[Asked]:
    chance = random.Random(0)
    return [
        Asked(
            chance.choice(TEXTS),
            chance.choice(SAMPLING),
            chance.randrange(1, 30),
            chance.choice(STOPS),
            plan=chance.choice(PLANS),
            logprobs=chance.choice([None, 2]),
            reuse_prefix=chance.random() < 0.3,
        )
        for _ in range(count)
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slots", SLOTS)
def test_64_requests_from_threads(sessions: dict[int, Session], alone: Alone, slots: int):
    """They arrive in random order from four threads, and some are cancelled."""
    session, asked = sessions[slots], some_requests(64)
    found: dict[int, tuple[str | None, list[int]]] = {}

    def ask(numbers: list[int]) -> None:
        streams = [session.generate(asked[i].text, asked[i].options()) for i in numbers]
        for stream in streams[::8]:
            stream.cancel()
        for number, stream in zip(numbers, streams, strict=True):
            stream.result()
            found[number] = (stream.finish_reason, stream.token_ids)

    order = list(range(len(asked)))
    random.Random(slots).shuffle(order)
    threads = [threading.Thread(target=ask, args=(order[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(found) == sorted(order)
    for number, (reason, tokens) in found.items():
        alone.assert_same(asked[number], tokens, whole=reason != "cancelled")
    assert sum(reason == "cancelled" for reason, _ in found.values()) <= 8
    assert_idle(session)
