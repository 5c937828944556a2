from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
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
from machines import fixed_times
from manifests import named_bundle
from mixed_requests import TEXTS, MixedRequest, PlainDecoder, random_request, requests
from reciting import assert_idle, watch_capacity

from pass_runtime import Session, TokenStream, load
from pass_runtime.bundle.sampling import SAMPLERS
from pass_runtime.decode.engine import Engine
from pass_runtime.decode.sequence import Piece, SequenceState
from pass_runtime.text.detokenizer import TextStream
from pass_runtime.tuning import auto as auto_module
from pass_runtime.tuning.auto import Auto, PassTimes, Tuner

SLOTS = (1, 3, 8)
TIMES = {
    "free rows": fixed_times({1: 1.0, 64: 1.0}),
    "cheap rows": fixed_times({1: 1.0, 64: 4.0}, lambda rows: 0.1 * (rows - 1) / 16),
    "expensive rows": fixed_times({1: 1.0, 64: 64.0}),
}


class FixedAuto(Auto):
    def __init__(self, session: Session, times: PassTimes) -> None:
        super().__init__(session.manifest.lookahead, session.backend.capabilities)
        self._fixed = {
            sampler: Tuner(times, session.manifest.lookahead.length, (0.6, 0.5, 0.3))
            for sampler in SAMPLERS
        }
        self._asked: set[tuple[str, int]] = set()

    def is_timed(self, sampler, size):
        return (sampler, size) in self._asked

    def untimed(self, sampler, size, _room):
        self._asked.add((sampler, size))
        return []

    def tuner(self, sampler, _size=1):
        return self._fixed[sampler]


class Batches(RuleBasedStateMachine):
    def __init__(self, sessions: dict[int, Session], plain: PlainDecoder) -> None:
        super().__init__()
        self.sessions, self.plain = sessions, plain
        self.submitted: list[tuple[MixedRequest, SequenceState]] = []

    @initialize(slots=st.sampled_from(SLOTS), times=st.sampled_from(sorted(TIMES)))
    def open(self, slots, times):
        self.session = self.sessions[slots]
        backend = self.session.backend
        backend.resize(backend.capabilities.capacities[0], [0] * slots)
        # A new engine, on buffers that hold what the example before left.
        self.engine = Engine(backend, FixedAuto(self.session, TIMES[times]), 100)

    @rule(request=requests())
    def submit(self, request):
        ids, options = self.session.encode(request.text), request.options()
        reader = TextStream(self.session.tokenizer, ids, options.stop)
        sequence = SequenceState(self.session.request(ids, options), reader)
        self.engine.reserve(1)
        self.engine.add(sequence)
        self.submitted.append((request, sequence))

    @rule(steps=st.integers(1, 6))
    def decode(self, steps):
        for _ in range(steps):
            self.engine.step()

    @rule(data=st.data())
    def cancel(self, data):
        if self.submitted:
            _, sequence = data.draw(st.sampled_from(self.submitted))
            sequence.cancelled = True

    @invariant()
    def every_request_waits_or_has_a_slot(self):
        if not self.submitted:
            return
        held = [
            *(slot.sequence for slot in self.engine.slots if slot.sequence),
            *self.engine.waiting,
        ]
        unfinished = [sequence for _, sequence in self.submitted if sequence.finished is None]
        assert sorted(map(id, held)) == sorted(map(id, unfinished))

    def teardown(self):
        if not hasattr(self, "engine"):  # an error came before `open`
            return
        for _ in range(10_000):
            if self.engine.idle:
                break
            self.engine.step()
        assert self.engine.idle
        for request, sequence in self.submitted:
            tokens = sequence.tokens[len(sequence.request.prompt_ids) :]
            assert sequence.finished is not None
            reason = sequence.finished.reason
            assert reason in ("stop", "length") or (reason == "cancelled" and sequence.cancelled)
            self.plain.assert_same(request, tokens, whole=reason != "cancelled")
            self.check_events(request, sequence, tokens)

    def check_events(self, request, sequence, tokens):
        """Check that the client got all `tokens`, with log-probabilities if it asked for them."""
        events = []
        while not sequence.events.empty():
            events.append(sequence.events.get())
        assert events.pop() is sequence.finished
        assert all(isinstance(event, Piece) for event in events)
        written = [token for event in events for token in event.tokens]
        assert [token.id for token in written] == tokens
        for token in written:
            assert (token.logprobs is not None) == (request.logprobs is not None)
            assert token.logprobs is None or len(token.logprobs.top) == request.logprobs


@pytest.fixture(scope="module", params=["tiny_bundle", "adapter_bundle", "int4"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return named_bundle(request)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> PlainDecoder:
    return PlainDecoder(load(bundle, "cpu", threads=1))


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
def test_no_order_of_events_changes_a_text(
    sessions: dict[int, Session], plain: PlainDecoder, monkeypatch
):
    # `auto` then decides as often as it can, whatever time that takes.
    monkeypatch.setattr(auto_module, "DECISION_TIME_SHARE", 1e9)
    run_state_machine_as_test(
        partial(Batches, sessions, plain),
        settings=settings(
            max_examples=36,
            stateful_step_count=24,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("slots", SLOTS)
def test_requests_from_four_threads_have_their_texts(
    sessions: dict[int, Session], plain: PlainDecoder, slots: int
):
    session, chance = sessions[slots], random.Random(0)
    requests = [random_request(chance, chance.choice(TEXTS), max_tokens=29) for _ in range(64)]

    def submit(numbers: list[int]) -> list[tuple[int, TokenStream]]:
        streams = [session.generate(requests[i].text, requests[i].options()) for i in numbers]
        for stream in streams[::8]:
            stream.cancel()
        return [(number, stream.result()) for number, stream in zip(numbers, streams, strict=True)]

    order = list(range(len(requests)))
    random.Random(slots).shuffle(order)
    with ThreadPoolExecutor(4) as threads:
        results = dict(chain(*threads.map(submit, [order[i::4] for i in range(4)])))
    cancelled = {number for number, each in results.items() if each.finish_reason == "cancelled"}
    for number, stream in results.items():
        plain.assert_same(requests[number], stream.token_ids, whole=number not in cancelled)
    # A request may be done before it is cancelled.
    assert len(cancelled) <= 8
    assert_idle(session)
