"""A sequence that moves to a lower slot keeps everything that its slot records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import SequenceState

PROMPTS = [list(range(20, 20 + length)) for length in (1, 5, 40)]


class WatchedRunner(Runner):
    """Checks the slots and the plan before every pass."""

    move_count = 0

    def _move(self, source, target):
        super()._move(source, target)
        WatchedRunner.move_count += 1
        # Drafts do not move: they are in the window of the slot that the sequence leaves.
        assert target.num_drafts == 0 and not target.staged

    def run(self, plan, drafts):
        for slot in self.busy:
            request = slot.current.request
            assert slot.prompt is request.prompt_ids and slot.salt == request.cache_salt
            assert slot.exact_prefix_len == slot.cached, "chains write what reading a prompt does"
        # Seeds number the requests in the order in which they began.
        sequences = (slot.current for slot in self.decoding)
        oldest = min(sequences, key=lambda sequence: sequence.request.sampling.seed)
        assert plan in oldest.request.cycle.plans, (plan.name, oldest.request.mode)
        return super().run(plan, drafts)


@pytest.fixture(scope="module")
def sessions(tiny_bundle: Path) -> Iterator[dict[int, Session]]:
    options = {"threads": 1, "verify": False}
    opened = {slots: load(tiny_bundle, "cpu", max_batch_size=slots, **options) for slots in (4, 8)}
    yield opened
    for session in opened.values():
        session.close()


requests = st.tuples(
    st.integers(0, 3),  # steps between the request before and this one
    st.sampled_from(PROMPTS),
    st.integers(1, 12),  # new tokens
    st.sampled_from(["ar", "two-pass", "fused", "fused:2,1,1"]),
    st.sampled_from(["", "a"]),  # salt of the prefix cache
)
plain_tokens: dict[tuple[int, int, int], list[int]] = {}
"""What `decode_plainly` wrote, by the number of slots, the prompt's length and the seed."""


def sequence_of(
    session: Session, seed: int, prompt: list[int], tokens: int, plan: str, salt: str = ""
) -> SequenceState:
    sampling = SamplingParams(0.9, seed=seed)
    options = GenerateOptions(tokens, sampling, plan=plan, ignore_eos=True, cache_salt=salt)
    return SequenceState(session.request(prompt, options))


def decode_watched(session: Session, drawn: list) -> list[SequenceState]:
    """Decode drawn `requests` with a `WatchedRunner`."""
    scheduler = Scheduler(WatchedRunner(session.backend), session._tuners, len(drawn))
    sequences = []
    for seed, (steps, *request) in enumerate(drawn):
        for _ in range(steps):
            scheduler.step()
        sequences.append(sequence_of(session, seed, *request))
        scheduler.reserve(1)
        scheduler.add(sequences[-1])
    while not scheduler.idle:
        scheduler.step()
    assert [sequence.finished.reason for sequence in sequences] == ["length"] * len(sequences)
    return sequences


def decode_plainly(session: Session, slots: int, prompt: list[int], seed: int) -> list[int]:
    """Return 12 tokens of a request that is decoded alone and without drafts."""
    key = slots, len(prompt), seed
    if key not in plain_tokens:
        sequence = sequence_of(session, seed, prompt, 12, "ar")
        scheduler = Scheduler(Runner(session.backend), None, 1)
        scheduler.reserve(1)
        scheduler.add(sequence)
        while not scheduler.idle:
            scheduler.step()
        plain_tokens[key] = sequence.tokens[len(prompt) :]
    return plain_tokens[key]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(slots=st.sampled_from([4, 8]), drawn=st.lists(requests, min_size=3, max_size=9))
def test_a_move_changes_no_text(sessions: dict[int, Session], slots: int, drawn: list):
    session = sessions[slots]
    for seed, sequence in enumerate(decode_watched(session, drawn)):
        prompt = list(sequence.request.prompt_ids)
        expected = decode_plainly(session, slots, prompt, seed)
        assert sequence.tokens[len(prompt) :] == expected[: sequence.request.max_new_tokens]


def test_after_a_move_the_oldest_request_still_decides_the_plan(sessions: dict[int, Session]):
    """The first request ends and the third moves to its slot, below the second, which is older.
    `WatchedRunner` checks the plans."""
    before = WatchedRunner.move_count
    tokens, plans = (3, 12, 12), ("ar", "two-pass", "fused")
    requests = zip(PROMPTS, tokens, plans, strict=True)
    decode_watched(sessions[4], [(0, *request, "") for request in requests])
    assert WatchedRunner.move_count > before
