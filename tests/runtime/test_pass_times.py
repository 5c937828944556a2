"""What `--plan auto` times: which passes, when, and its estimates of other passes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import HEAD, Machine, tiled, timed, times_by_rows
from reciting import assert_idle, engine_of, reciting_session

from pass_runtime.backends.base import Batch, Capabilities
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import ar_window, draft_window, fused_window, verify_window
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning.auto import (
    MAX_TIMED_ROWS,
    TIMED_RUNS,
    TIMED_WIDE_RUNS,
    WIDE_WINDOW_ROWS,
    Auto,
    PassShape,
    PassTimes,
    Tuner,
    probe_windows,
    shape_of,
)


def test_probes_leave_no_trace(tiny_bundle):
    session = reciting_session(tiny_bundle)
    prompt, sampling = [5, 6, 7], SamplingParams(0.9, seed=3)
    options = GenerateOptions(20, sampling, plan="two-pass", ignore_eos=True)
    expected = list(session.generate_ids(prompt, options))
    assert_idle(session)
    engine = engine_of(session)
    windows = probe_windows(6)
    times = [engine.time_pass(Batch(window, 1, "sample")) for window in windows]
    assert list(session.generate_ids(prompt, options)) == expected
    assert {window.width for window in windows if not window.next.drafts} == {1, 2, 5, 7}
    assert {window.width for window in windows if window.next.drafts} == {2, 7, 16, 49}
    assert all(seconds > 0 for passes in times for seconds in passes)


ABLE = Capabilities("test", 320, (4096,), (64, 1))


class Timer:
    """Times passes: `width` seconds, twice that for a window's first pass, ten times that for
    `paused` ones: (window, which of its passes, from 1)."""

    def __init__(self, paused=()):
        self.counts: dict[str, int] = {}
        self.paused = paused

    def __call__(self, batch):
        window = batch.window
        number = self.counts[window.name] = self.counts.get(window.name, 0) + 1
        factor = 10 if (window.name, number) in self.paused else 2 if number == 1 else 1
        seconds = window.width * factor
        return float(seconds), 0.0


@pytest.mark.parametrize(
    "paused", [(), (("ar", 2), ("draft-4", 3), ("fused-4", 1)), (("verify-1", 1),)]
)
def test_passes_are_timed_until_two_agree(tiny_bundle, paused):
    timer, lookahead = Timer(paused), read_manifest(tiny_bundle).lookahead
    auto = Auto(lookahead.model_copy(update={"length": 4}), ABLE)
    tuner, windows = timed(auto, "greedy", time_pass=timer), probe_windows(4)
    for window in windows:
        assert tuner.pass_seconds(window) == pytest.approx(window.width)
        # Of three passes, the first is slow anyway; another slow one takes a fourth pass.
        disturbed = any(name == window.name for name, number in paused if number > 1)
        count = TIMED_WIDE_RUNS if window.width > WIDE_WINDOW_ROWS else TIMED_RUNS - (not disturbed)
        assert timer.counts[window.name] == count


@pytest.mark.parametrize("lookahead", range(1, 17))
def test_at_most_eight_windows_are_timed_from_the_narrowest_to_the_widest(lookahead):
    windows = probe_windows(lookahead)
    assert len(windows) <= 8 and windows[0] == ar_window() and draft_window(lookahead) in windows
    full = fused_window([lookahead] * (lookahead + 1))
    assert max(window.width for window in windows) == min(full.width, MAX_TIMED_ROWS)
    # All other windows of 100 slots have more than MAX_TIMED_ROWS rows.
    assert probe_windows(lookahead, 100) == [ar_window()]


def test_another_sampler_times_narrow_passes_alone(tiny_bundle):
    names = set()

    def time_pass(batch):
        names.add(batch.window.name)
        row = {"greedy": 0.0, "sample": 0.1, "truncated": 0.2}[batch.sampler]
        window = batch.window
        tail = row * (window.drafts + 1 + 5 * window.next.drafts)  # a draft costs five rows
        factor = 1.0 if batch.sampler == "greedy" else 3.0
        return factor * (window.width + bool(window.next.drafts)), tail

    auto = Auto(read_manifest(tiny_bundle).lookahead, ABLE)
    greedy = timed(auto, "greedy", time_pass=time_pass)
    assert greedy.times().timed_widths == [1, 2, 5, 7, 16, 49]
    for sampler in ("sample", "truncated"):
        names.clear()
        tuner = timed(auto, sampler, time_pass=time_pass)
        assert names == {"ar", "verify-6", "draft-1", "draft-6"}
        windows = (
            verify_window(3),
            draft_window(4),
            fused_window([2, 1, 0]),
            fused_window([6] * 7),
        )
        for window in (ar_window(), *windows):
            expected = sum(time_pass(Batch(window, 1, sampler)))
            assert tuner.pass_seconds(window) == pytest.approx(expected, rel=0.03)
    assert auto.tuner("sample") is auto.tuner("sample") is not None


def time_by_width(batch: Batch) -> tuple[float, float]:
    return float(batch.size * batch.window.width), 0.1


@pytest.mark.parametrize("too_few", [0, 1, 2, 5, 7, 48])
def test_passes_are_timed_once_the_widest_fits_into_the_cache(tiny_bundle, too_few):
    """With fewer free entries than 49, the widest window, nothing is timed; later it is."""
    capabilities = reciting_session(tiny_bundle, slots=2).backend.capabilities
    auto = Auto(read_manifest(tiny_bundle).lookahead, capabilities)

    def tuner(sampler, batch, room):
        return timed(auto, sampler, batch, room, time_pass=time_by_width)

    for sampler, batch in (("greedy", 1), ("sample", 2)):
        assert tuner(sampler, batch, too_few) is None
        assert not auto.is_timed(sampler, batch)
    first = tuner("greedy", 1, 49)
    assert first is not None and first.times().timed_widths[-1] == 49
    assert tuner("greedy", 1, too_few) is first
    assert tuner("greedy", 2, too_few) is tuner("sample", 1, too_few) is None
    assert [*first.times_by_batch] == [1]
    assert tuner("greedy", 2, 49) is first
    assert first.times(2).timed_widths == [2, 4, 10, 14, 32, 34, 50]
    sampled = tuner("sample", 2, 49)
    assert sampled is not None and sampled.times().timed_widths == first.times().timed_widths
    assert sampled.times_by_batch.keys() == {1, 2}


def test_windows_of_more_than_half_the_capacity_are_not_timed(tiny_bundle):
    lookahead = read_manifest(tiny_bundle).lookahead
    widest_by_capacity = {4: 2, 8: 2, 12: 5, 16: 7, 32: 16, 64: 16, 96: 16, 100: 49}
    for capacity, rows in widest_by_capacity.items():
        auto = Auto(lookahead, replace(ABLE, capacities=(capacity,)))
        tuner = timed(auto, "greedy", room=100, time_pass=time_by_width)
        assert tuner is not None and tuner.times().timed_widths[-1] == rows
        for choice in tuner.choices(6):
            assert all(window.width <= capacity for window in choice.plan.windows)
    auto = Auto(lookahead, replace(ABLE, capacities=(64,), batch_sizes=(1, 2)))
    # 16 entries are enough for the widest window of one slot, but not of two.
    assert timed(auto, "greedy", 1, 16, time_pass=time_by_width) is not None
    assert timed(auto, "greedy", 2, 16, time_pass=time_by_width) is None
    assert timed(auto, "greedy", 2, 25, time_pass=time_by_width) is not None
    # Even one row, padded to 8, writes more than half of the KV capacity.
    padded = Auto(lookahead, replace(ABLE, capacities=(12,), least_width=8))
    assert padded.untimed("greedy", 1, 12) == []


def test_tokens_beyond_the_capacity_are_refused():
    with pytest.raises(ValueError, match="257 tokens do not fit a KV capacity of 256"):
        Capabilities("cpu", 50, (64, 256), (1,)).capacity(257)


def test_estimates_are_those_of_the_cpp_runtime():
    times = HEAD.times()
    windows = [
        ar_window(),
        verify_window(2),
        draft_window(4),
        fused_window([4] * 5),
        fused_window([2, 1, 0]),
    ]

    def figures():
        return [*(times.seconds(shape_of(window)) for window in windows), times.slowness]

    assert figures() == pytest.approx([1.4, 2.0, 4.6, 10.6, 4.3666666667, 1.0])
    for i, factor in ((0, 1.2), (3, 2.0), (1, 30.0), (4, 0.5), (0, 1.0)):
        times.record(shape_of(windows[i]), factor * HEAD.seconds(windows[i]))
    corrected = [1.4525, 2.2540212673, 4.9533589956, 11.6584074519, 4.5652908333, 1.0768171730]
    assert figures() == pytest.approx(corrected)


MACHINES = st.builds(
    lambda row, tile, **costs: Machine(tiled(1.0, tile, row), **costs),
    st.floats(0.0, 0.6),
    st.sampled_from([1, 1, 4, 8]),
    adapter=st.floats(0.0, 0.5),
    lookahead=st.floats(0.0, 0.1),
    tail=st.floats(0.0, 0.3),
    sampled=st.floats(0.0, 0.1),
    draft=st.floats(0.0, 0.2),
    noise=st.sampled_from([0.0, 0.02, 0.05]),
)
WINDOWS = st.one_of(
    st.builds(verify_window, st.integers(1, 4)),
    st.builds(draft_window, st.integers(1, 4)),
    st.builds(
        lambda drafts, size: fused_window([drafts, *[size] * drafts]), st.just(4), st.integers(0, 4)
    ),
)
QUICK = settings(derandomize=True, deadline=None, max_examples=30)


@QUICK
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_more_rows_are_never_expected_to_be_quicker(machine, seed):
    falling = times_by_rows({1: 3.0, 5: 2.0})
    assert falling.seconds(PassShape(9, 9, 0)) >= falling.seconds(PassShape(1, 1, 0))
    times = replace(machine, pauses=0.2).times(chance=random.Random(seed))
    for sampled, drafts in ((1, 0), (1, 4), (3, 2)):
        seconds = [times.seconds(PassShape(rows, sampled, drafts)) for rows in range(sampled, 100)]
        for narrow, wide in pairwise(seconds):
            assert 0 < narrow <= (1 + 1e-9) * wide < math.inf


@QUICK
@given(
    machine=MACHINES,
    passes=st.lists(st.tuples(WINDOWS, st.floats(1e-3, 1e3)), max_size=200),
    seed=st.integers(0, 99),
)
def test_any_recorded_time_changes_estimates_by_little(machine, passes, seed):
    times = machine.times(chance=random.Random(seed))
    for window, seconds in passes:
        before = [times.seconds(shape_of(each)) for each in (ar_window(), window)]
        times.record(shape_of(window), seconds)
        for each, old in zip((ar_window(), window), before, strict=True):
            assert 0 < times.seconds(shape_of(each)) < math.inf
            assert 0.9 * old < times.seconds(shape_of(each)) < 1.1 * old


@QUICK
@given(seconds=st.floats(1e-6, 10.0), rows=st.integers(1, 40), window=WINDOWS)
def test_one_timed_width_makes_no_draft_look_free(seconds, rows, window):
    times = PassTimes({PassShape(rows, rows, 0): (seconds, seconds / 10)})
    plain, drafting = shape_of(ar_window(), rows), shape_of(window, rows)
    assert times.seconds(plain) == pytest.approx(1.1 * seconds, rel=0.01)
    assert times.seconds(drafting) > 1.3 * times.seconds(plain)
    assert Tuner(times, 4, (0.9, 0.8, 0.7, 0.6)).decide(4, rows).plan.name == "ar"
