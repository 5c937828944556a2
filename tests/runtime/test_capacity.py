from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from reciting import (
    assert_idle,
    engine_of,
    reciting_session,
    watch_capacity,
    windows_run,
    words,
)

from pass_runtime.backends.ort.backend import (
    CAPACITY_STEP,
    FIRST_CAPACITY,
    doubling_capacities,
    stepped_capacities,
)
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.sequence import SequenceState
from pass_runtime.generation import TokenStream
from pass_runtime.measuring.lossless import first_difference
from pass_runtime.session import GenerateOptions, Session, load

CAPACITY = 768
"""The largest KV capacity of the tiny model."""


def run(
    session: Session,
    prompt: list[int],
    tokens: int = 2000,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen
) -> TokenStream:
    options = GenerateOptions(tokens, sampling, plan="two-pass", lookahead=6, ignore_eos=True)
    return session.generate_ids(prompt, options).result()


@pytest.mark.parametrize(
    "maximum", [4, *(size + i for size in (64, 256) for i in (-4, 0, 4)), 768, 4096, 131072]
)
def test_capacities_grow_up_to_the_models_own(maximum):
    doubling, stepped = doubling_capacities(maximum), stepped_capacities(maximum)
    assert (doubling[0], doubling[-1]) == (min(FIRST_CAPACITY, maximum), maximum)
    for smaller, larger in itertools.pairwise(doubling):
        assert larger == 2 * smaller or (larger == maximum and smaller < larger < 2 * smaller)
    assert (stepped[0], stepped[-1]) == (min(CAPACITY_STEP, maximum), maximum)
    assert not any(size % CAPACITY_STEP for size in stepped[:-1])
    for smaller, larger in itertools.pairwise(stepped):
        assert 0 < larger - smaller <= max(CAPACITY_STEP, smaller // 8)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(0.9, seed=1), SamplingParams(0.9, 50, 0.9)],
    ids=["plain", "truncated"],
)
@pytest.mark.parametrize("room", [1, 2, 6, 7, 8, 9])
def test_sampling_works_up_to_the_last_position(tiny_bundle, room, params):
    """Tails look up noise by the position of a token; the last one is one past the cache."""
    stream = run(reciting_session(tiny_bundle), [5] * (CAPACITY - room), sampling=params)
    assert stream.token_ids == [words(CAPACITY - room + i) for i in range(room + 1)]


@pytest.mark.parametrize(
    ("room", "plans"), [(13, ["draft-6", "verify-6", "draft-4", "verify-4"]), (1, ["ar", "ar"])]
)
def test_the_last_windows_are_narrower(tiny_bundle, room, plans):
    """After a plan with six drafts, 6 of 13 entries are left, in which four drafts fit."""
    session = reciting_session(tiny_bundle)
    names = windows_run(session)
    run(session, [5] * (CAPACITY - room))
    assert names == plans


def test_max_new_tokens_may_end_a_text_just_before_the_capacity_does(tiny_bundle):
    for tokens in (3, 4, 5, 6):
        stream = run(reciting_session(tiny_bundle), [5] * (CAPACITY - 4), tokens=tokens)
        assert (len(stream.token_ids), stream.finish_reason) == (min(tokens, 5), "length")


def test_capacity_grows_when_a_window_needs_it(tiny_bundle):
    session = reciting_session(tiny_bundle)
    small, large = session.backend.capabilities.capacities[-2:]
    capacities, run = [], session.backend.run

    def check_and_run(batch):
        (slot,) = engine_of(session).slots
        # A window of 7 rows is written after the cached entries.
        assert session.backend.capacity == (large if slot.cached + 7 > small else small)
        capacities.append(session.backend.capacity)
        return run(batch)

    session.backend.run = check_and_run  # type: ignore[method-assign]
    options = GenerateOptions(40, plan="two-pass", ignore_eos=True)
    session.generate_ids([5] * (small - 22), options).result()
    assert set(capacities) == {small, large}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_growing_keeps_the_cache(tiny_bundle, temperature):
    sampling = SamplingParams(temperature, seed=1)
    options = GenerateOptions(40, sampling, plan="two-pass", ignore_eos=True)
    session = load(tiny_bundle, "cpu", threads=1)
    small, large = session.backend.capabilities.capacities[-2:]
    prompt = np.random.default_rng(4).integers(2, 300, small - 17).tolist()
    grown = session.generate_ids(prompt, options).result().token_ids
    assert (session.backend.capacity, len(grown)) == (large, 40)
    wide = load(tiny_bundle, "cpu", threads=1)
    wide.backend.resize(large, [0])  # and no later call changes the capacity
    wide.backend.resize = lambda *_: None  # type: ignore[method-assign]
    expected = wide.generate_ids(prompt, options).result().token_ids
    difference = first_difference(session, prompt, options, expected, grown)
    assert difference is None or difference.is_near_tie, difference


def test_capacity_shrinks_after_a_long_prompt(tiny_bundle):
    session = reciting_session(tiny_bundle)
    small, *_, large = session.backend.capabilities.capacities
    middle = session.backend.capabilities.capacity(310)
    options = GenerateOptions(4, plan="two-pass", ignore_eos=True)
    for length, capacity in ((300, middle), (5, small), (700, large), (300, middle), (2, small)):
        session.generate_ids([5] * length, options).result()
        assert session.backend.capacity == capacity, length


def test_the_cache_does_not_shrink_below_a_reused_prefix(tiny_bundle):
    session = reciting_session(tiny_bundle)
    options = GenerateOptions(4, plan="ar", reuse_prefix=True, ignore_eos=True)
    session.generate_ids([5] * 300, options).result()
    assert session.generate_ids([5] * 310, options).result().stats.cached_tokens == 288
    session.generate_ids([5] * 20, options).result()
    assert session.backend.capacity == session.backend.capabilities.capacities[0]


def test_masked_slots_write_within_a_cache_that_shrank(tiny_bundle):
    """A free slot among busy ones keeps the 500 tokens of a finished request."""
    session = reciting_session(tiny_bundle, slots=8)
    watch_capacity(session.backend)
    engine = engine_of(session)

    def submit(length: int, tokens: int) -> SequenceState:
        options = GenerateOptions(tokens, plan="fused", ignore_eos=True)
        sequence = SequenceState(session.request([5] * length, options))
        engine.reserve(1)
        engine.add(sequence)
        return sequence

    short = [submit(3, 80), submit(4, 80)]
    long = submit(500, 1)
    short += [submit(5, 80), submit(6, 80), submit(7, 80)]
    while long.finished is None:
        engine.step()
    engine.step()
    free = next(slot for slot in engine.slots if len(slot.kept) == 500)
    assert free.masked_at == 500 and free.number < 5
    assert session.backend.capacity > 500
    late = submit(2, 30)
    engine.step()
    assert session.backend.capacity < 200
    while not engine.idle:
        engine.step()
    for sequence in (*short, late):
        assert sequence.finished.reason == "length"
        positions = range(len(sequence.request.prompt_ids), len(sequence.tokens))
        assert sequence.tokens[positions.start :] == [*map(words, positions)]


SMALL_CAPACITIES = (4, 8, 12, 16, 32, 64)
BATCHES = (1, 2, 3)
PLANS = ("ar", "two-pass", "fused", "fused:3,1,0,2", "auto")
DRAFTS = ("lookahead", "ngram", "both")
FREE_ENTRIES = (0, 1, 2, 3)
"""Entries that the longest prompt leaves free. What 0 spoils shows in later requests."""
MORE_THAN_FIT = 1000


@dataclass(frozen=True)
class Case:
    plan: str
    draft: str | None
    prompt_lengths: tuple[int, ...]


def cases(capacity: int, batch: int) -> Iterator[Case]:
    for free in FREE_ENTRIES:
        first, third = (max(1, capacity - entries) for entries in (free, (free + 2) % 4))
        for plan in PLANS:
            for draft in DRAFTS if plan != "ar" else (None,):
                yield Case(plan, draft, (first, 1, third)[:batch])


def prompt_of(length: int) -> list[int]:
    return [5 + i % 3 for i in range(length)]


def texts_needed(capacity: int) -> Sequence[int]:
    lengths = (case.prompt_lengths for batch in BATCHES for case in cases(capacity, batch))
    return sorted({length for of_case in lengths for length in of_case})


def until_full(plan: str, draft: str | None = None) -> GenerateOptions:
    return GenerateOptions(MORE_THAN_FIT, plan=plan, draft=draft, ignore_eos=True)


def check_table(session: Session, capacity: int, expected: dict[int, list[int]]) -> None:
    for batch in BATCHES:
        for case in cases(capacity, batch):
            options, lengths = until_full(case.plan, case.draft), case.prompt_lengths
            streams = [session.generate_ids(prompt_of(length), options) for length in lengths]
            for length, stream in zip(lengths, streams, strict=True):
                tokens = stream.result().token_ids
                assert (stream.finish_reason, stream.stop_reason) == ("length", None), case
                assert len(tokens) == capacity - length + 1, case
                prompt = prompt_of(length)
                difference = first_difference(session, prompt, options, tokens, expected[length])
                assert difference is None or difference.is_near_tie, (case, difference)


def check_timing(session: Session, expected: Sequence[int]) -> None:
    capacity = session.backend.capabilities.max_capacity
    for batch in (1, 3):
        # They are submitted between two passes, so that they decode together.
        streams = session._worker.call(
            lambda count=batch: [
                session.generate_ids(prompt_of(1), until_full("auto")) for _ in range(count)
            ]
        )
        assert all(stream.result().token_ids == expected for stream in streams)
    assert_idle(session)
    times = session.tuner(SamplingParams()).times_by_batch
    # Timing wants room for two passes.
    fitting = {width for width in (2, 5, 7, 16, 17) if 2 * width <= capacity}
    assert {*times[1].timed_widths} == {1, *fitting}
    assert len(times) > 1 and all(len(each.timed_widths) > 1 for each in times.values())


@pytest.mark.slow
@pytest.mark.parametrize("capacity", SMALL_CAPACITIES)
def test_every_plan_writes_the_text_of_plain_decoding(random_bundle: Path, capacity: int):
    with load(random_bundle, "cpu", threads=1, capacity=capacity, max_batch_size=3) as session:
        expected = {
            length: session.generate_ids(prompt_of(length), until_full("ar")).result().token_ids
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_timing(session, expected[1])


@pytest.mark.parametrize("capacity", SMALL_CAPACITIES)
def test_a_text_whose_drafts_are_all_right_fills_the_capacity(tiny_bundle: Path, capacity: int):
    with reciting_session(tiny_bundle, slots=3, capacity=capacity) as session:
        expected = {
            length: [words(position) for position in range(length, capacity + 1)]
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_timing(session, expected[1])
