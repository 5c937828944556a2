from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.measuring.lossless import (
    LOOP_REPEATS,
    MAX_PERIOD_TOKENS,
    MIN_LOOP_TOKENS,
    loop_start,
)
from pass_runtime.measuring.real_use import PassCounts, count_passes, split_at_loop

DISTINCT = st.integers(0, 60).map(lambda size: list(range(1000, 1000 + size)))
PERIODS = st.integers(1, MAX_PERIOD_TOKENS).map(lambda period: list(range(period)))


def least_loop(period: int) -> int:
    """Return the fewest tokens of a loop that is found anywhere in a text."""
    return max(LOOP_REPEATS * period, MIN_LOOP_TOKENS)


@settings(deadline=None)
@given(DISTINCT, PERIODS, st.integers(0, 100), DISTINCT)
def test_a_loop_starts_after_its_first_period(before, period, more, after):
    length = least_loop(len(period)) + more
    loop = [period[i % len(period)] for i in range(length)]
    text = [*before, *loop, *(token + 5000 for token in after)]
    assert loop_start(text) == len(before) + len(period)


@settings(deadline=None)
@given(DISTINCT, PERIODS, st.integers(0, 200), st.integers(1, 9))
def test_too_few_repeats_are_no_loop(before, period, length, after):
    length %= least_loop(len(period))
    loop = [period[i % len(period)] for i in range(length)]
    assert loop_start([*before, *loop, *range(2000, 2000 + after)]) is None


@settings(deadline=None)
@given(DISTINCT, PERIODS)
def test_a_text_that_ends_in_its_second_repeat_loops(before, period):
    times = -(-max(2 * len(period), MIN_LOOP_TOKENS) // len(period))
    assert loop_start([*before, *period * times]) == len(before) + len(period)
    if 2 * len(period) > MIN_LOOP_TOKENS:
        assert loop_start([*before, *period, *period[:-1]]) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=120))
def test_every_loop_repeats_a_period(text):
    """From its start on, over at least as many tokens as a loop has."""
    start = loop_start(text)
    if start is None:
        return
    runs = {}
    for period in range(1, min(MAX_PERIOD_TOKENS, start) + 1):
        run = 0
        while start + run < len(text) and text[start + run] == text[start + run - period]:
            run += 1
        runs[period] = run
    assert any(run + period >= MIN_LOOP_TOKENS and run >= period for period, run in runs.items())


@settings(deadline=None)
@given(st.lists(st.integers(0, 1), max_size=150), st.lists(st.integers(0, 1), max_size=50))
def test_in_a_longer_text_the_loop_starts_no_later(text, more):
    """The token 7 ends all repeats."""
    start, longer = loop_start([*text, 7]), loop_start([*text, 7, *more])
    assert start is None or (longer is not None and longer <= start)


def test_nothing_repeats_in_short_texts():
    assert loop_start([]) is None and loop_start([1] * (MIN_LOOP_TOKENS - 1)) is None
    assert loop_start([1] * MIN_LOOP_TOKENS) == 1


def test_only_the_text_before_the_loop_counts():
    text = [*range(100), *[5, 6, 7] * 40]
    assert split_at_loop(text, 128) == (range(103), range(103, 128))
    assert split_at_loop(text, 90) == (range(90), range(90, 90))
    assert split_at_loop(text[:50], 128) == (range(50), range(50, 50))


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=40), st.integers(0, 60), st.integers(0, 60))
def test_passes_are_counted_where_they_begin(sizes, cut, more):
    end = cut + more
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    expected = [size for begin, size in zip(begins, sizes, strict=True) if cut <= begin < end]
    assert count_passes(sizes, range(cut, end)) == PassCounts(len(expected), sum(expected))
    before, after = count_passes(sizes, range(cut)), count_passes(sizes, range(cut, end))
    assert count_passes(sizes, range(end)) == before + after
    assert PassCounts(4, 6).tau == pytest.approx(1.5) and PassCounts().tau == 0
