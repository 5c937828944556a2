"""What `--plan auto` times: which passes, when, and its estimates of other passes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import Machine, tiled, times_by_rows
from reciting import assert_idle, reciting_session, runner_of

from pass_runtime.backends.base import Capabilities, PassKind
from pass_runtime.bundle.plan import ar_plan, draft_plan, fused_plan, verify_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning.estimates import (
    MAX_TIMED_ROWS,
    TIMED_RUNS,
    TIMED_WIDE_RUNS,
    WIDE_WINDOW_ROWS,
    PassShape,
    PassTimes,
    measure,
    probe_plans,
    shape_of,
)
from pass_runtime.tuning.tuner import Tuner, Tuners


def test_probes_leave_no_trace(tiny_bundle):
    session = reciting_session(tiny_bundle)
    prompt, sampling = [5, 6, 7], SamplingParams(0.9, seed=3)
    options = GenerateOptions(20, sampling, plan="two-pass", ignore_eos=True)
    expected = list(session.generate_ids(prompt, options))
    assert_idle(session)
    runner = runner_of(session)
    times = measure(
        lambda plan: runner.time_masked_pass(PassKind(plan, 1, "sample")), probe_plans(6)
    )
    assert list(session.generate_ids(prompt, options)) == expected
    assert {plan.width for plan in times if not plan.next.drafts} == {1, 2, 5, 7}
    assert {plan.width for plan in times if plan.next.drafts} == {2, 7, 16, 49}
    assert all(seconds > 0 for passes in times.values() for seconds in passes)


class Timer:
    """Times passes: `width` seconds, twice that for a plan's first pass, ten times that for
    `paused` ones: (plan, which of its passes, from 1)."""

    def __init__(self, paused=()):
        self.counts: dict[str, int] = {}
        self.paused = paused

    def __call__(self, plan):
        number = self.counts[plan.name] = self.counts.get(plan.name, 0) + 1
        factor = 10 if (plan.name, number) in self.paused else 2 if number == 1 else 1
        seconds = plan.width * factor
        return float(seconds), seconds / 10


@pytest.mark.parametrize(
    "paused", [(), (("ar", 2), ("draft-4", 3), ("fused-4", 1)), (("verify-1", 1),)]
)
def test_passes_are_timed_until_two_agree(paused):
    """A pause of one pass is not in the result. Wide passes are timed twice, to save time."""
    timer, plans = Timer(paused), probe_plans(4)
    times = measure(timer, plans)
    assert times == {plan: (plan.width, pytest.approx(plan.width / 10)) for plan in plans}
    for plan in plans:
        # Of three passes, the first is slow anyway; another slow one takes a fourth pass.
        disturbed = any(name == plan.name for name, number in paused if number > 1)
        count = TIMED_WIDE_RUNS if plan.width > WIDE_WINDOW_ROWS else TIMED_RUNS - (not disturbed)
        assert timer.counts[plan.name] == count


@pytest.mark.parametrize("lookahead", range(1, 17))
def test_at_most_eight_plans_are_timed_from_the_narrowest_to_the_widest(lookahead):
    plans = probe_plans(lookahead)
    assert len(plans) <= 8 and plans[0] == ar_plan() and draft_plan(lookahead) in plans
    full = fused_plan([lookahead] * (lookahead + 1))
    assert max(plan.width for plan in plans) == min(full.width, MAX_TIMED_ROWS)
    # All other plans of 100 slots have more than MAX_TIMED_ROWS rows.
    assert probe_plans(lookahead, 100) == [ar_plan()]


def test_another_sampler_times_narrow_passes_alone(tiny_bundle):
    """The times of its trunk follow from those of the first sampler."""
    timed_kinds = []

    def time_masked_pass(kind):
        timed_kinds.append(kind)
        row = {"greedy": 0.0, "sample": 0.1, "truncated": 0.2}[kind.sampler]
        tail = row * (kind.plan.drafts + 1 + 5 * kind.plan.next.drafts)  # a draft costs five rows
        factor, width = 1.0 if kind.sampler == "greedy" else 3.0, kind.plan.width
        return factor * (width + bool(kind.plan.next.drafts)), tail

    session = reciting_session(tiny_bundle)
    tuners = Tuners(session.manifest, session.backend.capabilities, time_masked_pass, lambda: 1000)
    assert tuners.get("greedy").times().timed_widths == [1, 2, 5, 7, 16, 49]
    for sampler in ("sample", "truncated"):
        timed_kinds.clear()
        tuner = tuners.get(sampler)
        assert {kind.plan.name for kind in timed_kinds} == {"ar", "verify-6", "draft-1", "draft-6"}
        plans = (verify_plan(3), draft_plan(4), fused_plan([2, 1, 0]), fused_plan([6] * 7))
        for plan in (ar_plan(), *plans):
            expected = sum(time_masked_pass(PassKind(plan, 1, sampler)))
            assert tuner.plan_seconds(plan) == pytest.approx(expected, rel=0.03)
    assert tuners.get("sample") is tuners.get("sample")


def time_by_width(kind: PassKind) -> tuple[float, float]:
    """Return the seconds of trunk and tail: the trunk takes a second for each row."""
    return float(kind.batch * kind.plan.width), 0.1


@pytest.mark.parametrize("too_few", [0, 1, 2, 5, 7, 48])
def test_passes_are_timed_once_the_widest_fits_into_the_cache(tiny_bundle, too_few):
    """With fewer free entries than 49, the widest window, nothing is timed; later it is."""
    free_entries = too_few
    session = reciting_session(tiny_bundle, slots=2)
    timed_passes = []

    def time_masked_pass(kind):
        timed_passes.append((kind.batch, kind.plan.width))
        return float(kind.plan.width), 0.1

    tuners = Tuners(
        session.manifest, session.backend.capabilities, time_masked_pass, lambda: free_entries
    )
    for sampler, batch in (("greedy", 1), ("sample", 2)):
        assert tuners.get(sampler, batch) is None
        assert not tuners.is_timed(sampler, batch)
    assert timed_passes == []
    free_entries = 49
    first = tuners.get("greedy")
    assert first is not None and first.times().timed_widths[-1] == 49
    free_entries = too_few
    assert tuners.get("greedy") is first
    assert tuners.get("greedy", 2) is tuners.get("sample") is None
    assert [*first.times_by_batch] == [1]
    free_entries = 49
    assert tuners.get("greedy", 2) is first
    assert first.times(2).timed_widths == [2, 4, 10, 14, 32, 50]
    sampled = tuners.get("sample", 2)
    assert sampled is not None and sampled.times().timed_widths == first.times().timed_widths
    assert sampled.times_by_batch.keys() == {1, 2}


def test_windows_of_more_than_half_the_capacity_are_not_timed(tiny_bundle):
    manifest, sizes = read_manifest(tiny_bundle), reciting_session(tiny_bundle).backend.capabilities
    widest_by_capacity = {4: 2, 8: 2, 12: 5, 16: 7, 32: 16, 64: 16, 96: 16, 100: 49}
    for capacity, rows in widest_by_capacity.items():
        sizes = replace(sizes, capacities=(capacity,))
        tuner = Tuners(manifest, sizes, time_by_width, lambda: 100).get("greedy")
        assert tuner is not None and tuner.times().timed_widths[-1] == rows
        for candidate in tuner.candidates(6):
            assert all(plan.width <= capacity for plan in candidate.cycle.plans)
    free_entries = 16  # enough for the widest window of one slot, but not of two
    sizes = replace(sizes, capacities=(64,), batch_sizes=(1, 2))
    tuners = Tuners(manifest, sizes, time_by_width, lambda: free_entries)
    assert tuners.get("greedy") is not None and tuners.get("greedy", 2) is None
    free_entries = 25
    assert tuners.get("greedy", 2) is not None
    # Even one row, padded to 8, writes more than half of the KV capacity.
    padded = replace(sizes, capacities=(12,), least_width=8)
    assert Tuners(manifest, padded, pytest.fail, lambda: 12).get("greedy") is None


def test_a_large_batch_with_one_timed_width_is_estimated_as_a_window(tiny_bundle):
    """With one width alone, wider passes would seem to cost nothing more."""
    sizes = replace(reciting_session(tiny_bundle).backend.capabilities, batch_sizes=(1, 32, 33))
    tuners = Tuners(read_manifest(tiny_bundle), sizes, time_by_width, lambda: 768)
    tuner = tuners.get("greedy", 33)
    assert tuner is not None and tuners.is_timed("greedy", 33) and not tuners.is_timed("greedy", 32)
    assert [*tuner.times_by_batch] == [1]
    assert tuner.plan_seconds(verify_plan(4), 33) > 4 * tuner.plan_seconds(ar_plan(), 33)
    tuners.get("greedy", 32)  # times one and two rows a slot
    assert tuner.times(32).timed_widths == [32, 64]
    for plan in (verify_plan(4), draft_plan(4), fused_plan([4] * 5)):
        assert tuner.plan_seconds(plan, 32) == pytest.approx(32 * plan.width + 0.1, rel=0.01)
    assert tuner.decide(6, 32).cycle.name == tuner.decide(6, 33).cycle.name == "ar"


def test_times_between_the_timed_widths_are_interpolated():
    times = times_by_rows({1: 1.0, 5: 2.0, 9: 4.0}, lambda rows: 0.45 + 0.05 * rows)
    # (rows, sampled rows): seconds of trunk and tail together
    for shape, seconds in {(3, 1): 2.0, (9, 5): 4.7, (5, 5): 2.7, (1, 1): 1.5}.items():
        assert times.seconds(PassShape(*shape, 0)) == pytest.approx(seconds, rel=0.05)
    assert times.seconds(shape_of(fused_plan([1, 0]))) == pytest.approx(
        times.seconds(PassShape(3, 3, 0)), rel=0.05
    )
    assert times.seconds(PassShape(17, 9, 0)) > 1.5 * times.seconds(PassShape(9, 9, 0))


def test_tokens_beyond_the_capacity_are_refused():
    with pytest.raises(ValueError, match="257 tokens do not fit a KV capacity of 256"):
        Capabilities("cpu", 50, (64, 256), (1,)).capacity(257)


def test_one_timed_pass_with_lookahead_rows_shows_what_such_rows_add():
    """Other passes with look-ahead rows take as much longer than passes without: 0.5 s."""
    plain = {PassShape(rows, rows, 0): (0.75 + 0.25 * rows, 0.1 * rows) for rows in (1, 5)}
    times = PassTimes({**plain, shape_of(draft_plan(4)): (4.0, 0.9)})
    assert times.seconds(shape_of(draft_plan(4))) == pytest.approx(4.9)
    assert times.seconds(shape_of(draft_plan(2))) == pytest.approx(3.5 + 0.5)
    assert times.seconds(shape_of(fused_plan([4] * 5))) == pytest.approx(9.0 + 0.9 + 0.4)


HEAD = Machine(
    lambda rows: 1 + 0.25 * rows, adapter=0.8, lookahead=0.05, tail=0.1, sampled=0.05, draft=0.3
)


def test_estimates_include_the_adapter_and_the_draft_head():
    """An adapter costs the same for any number of look-ahead rows; a head runs once per draft."""
    times = HEAD.times()
    plans = (verify_plan(2), verify_plan(4), draft_plan(3), fused_plan([1, 1]), fused_plan([4] * 5))
    for plan in plans:
        assert times.seconds(shape_of(plan)) == pytest.approx(HEAD.seconds(plan), rel=0.02)


@pytest.mark.parametrize("tile", [8, 16])
def test_windows_that_fill_tiles_are_timed(tile):
    """One row more would take another tile, so an interpolated time would be too long."""
    machine = Machine(tiled(1.0, tile, 0.5))
    times = machine.times()
    for plan in (fused_plan([2, 2, 1]), fused_plan([3] * 4)):
        assert plan.width % 8 == 0
        assert times.seconds(shape_of(plan)) == pytest.approx(machine.seconds(plan))


def test_estimates_are_those_of_the_cpp_runtime():
    """runtime/cpp/tests/parts_test.cpp expects the same figures: both runtimes decide alike."""
    times = HEAD.times()
    plans = [ar_plan(), verify_plan(2), draft_plan(4), fused_plan([4] * 5), fused_plan([2, 1, 0])]

    def figures():
        return [*(times.seconds(shape_of(plan)) for plan in plans), times.slowness]

    assert figures() == pytest.approx([1.4, 2.0, 4.6, 10.6, 4.3666666667, 1.0])
    for i, factor in ((0, 1.2), (3, 2.0), (1, 30.0), (4, 0.5), (0, 1.0)):
        times.record(shape_of(plans[i]), factor * HEAD.seconds(plans[i]))
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
PLANS = st.one_of(
    st.builds(verify_plan, st.integers(1, 4)),
    st.builds(draft_plan, st.integers(1, 4)),
    st.builds(
        lambda drafts, size: fused_plan([drafts, *[size] * drafts]), st.just(4), st.integers(0, 4)
    ),
)
QUICK = settings(derandomize=True, deadline=None, max_examples=30)


@QUICK
@given(machine=MACHINES, seed=st.integers(0, 99))
def test_more_rows_are_never_expected_to_be_quicker(machine, seed):
    """Even if the timed passes vary much, or wider ones were quicker."""
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
    passes=st.lists(st.tuples(PLANS, st.floats(1e-3, 1e3)), max_size=200),
    seed=st.integers(0, 99),
)
def test_any_recorded_time_changes_estimates_by_little(machine, passes, seed):
    times = machine.times(chance=random.Random(seed))
    for plan, seconds in passes:
        before = [times.seconds(shape_of(each)) for each in (ar_plan(), plan)]
        times.record(shape_of(plan), seconds)
        for each, old in zip((ar_plan(), plan), before, strict=True):
            assert 0 < times.seconds(shape_of(each)) < math.inf
            assert 0.9 * old < times.seconds(shape_of(each)) < 1.1 * old


@QUICK
@given(machine=MACHINES, plans=st.lists(PLANS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_estimates_converge_to_what_passes_take(machine, plans, seed):
    """The pauses of one pass in 30 change the estimates by some percent only."""
    chance, paused = random.Random(seed), replace(machine, pauses=1 / 30)
    times = machine.times(chance=random.Random(seed))
    for plan in [ar_plan(), *plans] * 60:
        times.record(shape_of(plan), machine.seconds(plan) * paused.factor(chance))
    for plan in (ar_plan(), *plans):
        mean = machine.seconds(plan) * (1 + 0.8 * machine.noise)
        assert times.seconds(shape_of(plan)) == pytest.approx(mean, rel=0.12)


@QUICK
@given(machine=MACHINES, plan=PLANS, slower=st.floats(1.3, 4.0), seed=st.integers(0, 99))
def test_a_machine_that_became_slower_makes_every_pass_slower(machine, plan, slower, seed):
    """Passes with other plans are expected to be slower too, so that the plan stays the best."""
    chance = random.Random(seed)
    times, wide = machine.times(chance=chance), shape_of(verify_plan(4))
    for _ in range(40):
        times.record(shape_of(plan), machine.seconds(plan) * machine.factor(chance))
    ratio = times.seconds(wide) / times.seconds(shape_of(ar_plan()))
    for _ in range(60):
        times.record(shape_of(plan), slower * machine.seconds(plan) * machine.factor(chance))
    assert times.seconds(shape_of(plan)) == pytest.approx(slower * machine.seconds(plan), rel=0.2)
    later_ratio = times.seconds(wide) / times.seconds(shape_of(ar_plan()))
    assert later_ratio == pytest.approx(ratio, rel=0.25)


@QUICK
@given(seconds=st.floats(1e-6, 10.0), rows=st.integers(1, 40), plan=PLANS)
def test_one_timed_width_makes_no_draft_look_free(seconds, rows, plan):
    times = PassTimes({PassShape(rows, rows, 0): (seconds, seconds / 10)})
    plain, drafting = shape_of(ar_plan(), rows), shape_of(plan, rows)
    assert times.seconds(plain) == pytest.approx(1.1 * seconds, rel=0.01)
    assert times.seconds(drafting) > 1.3 * times.seconds(plain)
    assert Tuner(times, 4, (0.9, 0.8, 0.7, 0.6)).decide(4, rows).cycle.name == "ar"
