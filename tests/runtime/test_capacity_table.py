from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from reciting import assert_idle, reciting_session, words

from pass_runtime import GenerateOptions, Session, load
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.measuring.lossless import first_difference

CAPACITIES = (4, 8, 12, 16, 32, 64)
BATCHES = (1, 2, 3)
PLANS = ("ar", "two-pass", "fused", "fused:3,1,0,2", "auto")
DRAFTS = ("lookahead", "ngram", "both")
FREE_ENTRIES = (0, 1, 2, 3)
"""Entries of the cache that the longest prompt leaves free. 0 comes first, so that what it might
spoil shows in later requests."""
UNLIMITED = 1000
"""A number of new tokens that is larger than any of the capacities."""


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
    return GenerateOptions(UNLIMITED, plan=plan, draft=draft, ignore_eos=True)


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
    fitting = {width for width in (2, 5, 7, 16) if 2 * width <= capacity}
    assert {*times[1].timed_widths} == {1, *fitting}
    assert len(times) > 1 and all(len(each.timed_widths) > 1 for each in times.values())


@pytest.mark.slow
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_plan_writes_the_text_of_plain_decoding(random_bundle: Path, capacity: int):
    with load(random_bundle, "cpu", threads=1, capacity=capacity, max_batch_size=3) as session:
        expected = {
            length: session.generate_ids(prompt_of(length), until_full("ar")).result().token_ids
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_timing(session, expected[1])


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_text_whose_drafts_are_all_right_fills_the_capacity(tiny_bundle: Path, capacity: int):
    with reciting_session(tiny_bundle, slots=3, capacity=capacity) as session:
        expected = {
            length: [words(position) for position in range(length, capacity + 1)]
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_timing(session, expected[1])
