"""Small capacities with prompts near their end: every plan and source of drafts, in batches too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from capacity_table import BATCHES, CAPACITIES, UNLIMITED, cases, prompt_of, texts_needed
from reciting import assert_idle, reciting_session, words

from pass_runtime import GenerateOptions, Session, load
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.measuring.lossless import first_difference

GREEDY = SamplingParams(0.0)


def options(plan: str, draft: str | None = None) -> GenerateOptions:
    return GenerateOptions(UNLIMITED, GREEDY, plan=plan, draft=draft, ignore_eos=True)


def check_table(session: Session, capacity: int, expected: dict[int, list[int]]) -> None:
    """Every case writes the `expected` tokens, by the length of the prompt."""
    for batch in BATCHES:
        for case in cases(capacity, batch):
            asked = options(case.plan, case.draft)
            streams = [session.generate_ids(prompt_of(length), asked) for length in case.prompts]
            for length, stream in zip(case.prompts, streams, strict=True):
                tokens = stream.result().token_ids
                assert (stream.finish_reason, stream.stop_reason) == ("length", None), case
                assert len(tokens) == capacity - length + 1, case
                prompt = prompt_of(length)
                parted = first_difference(session, prompt, asked, tokens, expected[length])
                assert parted is None or parted.is_near_tie, (case, parted)


def check_tuned(session: Session, expected: Sequence[int]) -> None:
    """Later requests with room to spare time passes of every width that this capacity has."""
    capacity = session.backend.capabilities.max_capacity
    for batch in (1, 3):
        # They are submitted between two passes, so that they decode together.
        streams = session._worker.call(
            lambda count=batch: [
                session.generate_ids(prompt_of(1), options("auto")) for _ in range(count)
            ]
        )
        assert all(stream.result().token_ids == expected for stream in streams)
    assert_idle(session)
    times = session._tuners.get("greedy").times_by_batch
    fitting = {width for width in (2, 5, 7, 16) if 2 * width <= capacity}
    assert {*times[1].timed_widths} == {1, *fitting}
    assert len(times) > 1 and all(len(each.timed_widths) > 1 for each in times.values())


@pytest.mark.slow
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_every_plan_writes_the_text_of_plain_decoding(random_bundle: Path, capacity: int):
    with load(random_bundle, "cpu", threads=1, capacity=capacity, max_batch_size=3) as session:
        expected = {
            length: session.generate_ids(prompt_of(length), options("ar")).result().token_ids
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_tuned(session, expected[1])


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_drafts_that_are_all_right_end_at_the_capacity_too(tiny_bundle: Path, capacity: int):
    with reciting_session(tiny_bundle, slots=3, capacity=capacity) as session:
        expected = {
            length: [words(position) for position in range(length, capacity + 1)]
            for length in texts_needed(capacity)
        }
        check_table(session, capacity, expected)
        check_tuned(session, expected[1])
