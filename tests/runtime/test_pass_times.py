"""What `--plan auto` times: which passes, when, and what their times say of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reciting import assert_idle, reciting_session, runner_of

from pass_runtime.backends.base import Capabilities, PassKind
from pass_runtime.bundle.plan import ar_plan, draft_plan, fused_plan, verify_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning.pass_times import WIDEST, PassTimes, between, measure, probe_plans
from pass_runtime.tuning.tuners import Tuners


def test_probes_leave_no_trace(tiny_bundle):
    session = reciting_session(tiny_bundle)
    prompt, asked = [5, 6, 7], GenerateOptions(20, SamplingParams(0.9, seed=3), plan="two-pass", ignore_eos=True)
    expected = list(session.generate_ids(prompt, asked))
    assert_idle(session)
    runner = runner_of(session)
    times = measure(lambda plan: runner.idle_pass(PassKind(plan, 1, "sample")), probe_plans(6))
    assert list(session.generate_ids(prompt, asked)) == expected
    assert set(times.trunk) == set(times.tail) == {1, 2, 5, 7}
    assert set(times.lookahead) == {2, 7, 16, 49} and set(times.drafting) == {1, 6}
    curves = (times.trunk, times.tail, times.lookahead, times.drafting)
    assert all(seconds > 0 for curve in curves for seconds in curve.values())


class Timer:
    """Passes that take their width in seconds, the first one over a plan twice that; `paused` ones ten times."""

    def __init__(self, paused=()):
        self.count: dict[str, int] = {}
        self.paused = paused

    def __call__(self, plan):
        number = self.count[plan.name] = self.count.get(plan.name, 0) + 1
        seconds = plan.width * (10 if (plan.name, number) in self.paused else 2 if number == 1 else 1)
        return float(seconds), seconds / 10


@pytest.mark.parametrize("paused", [(), (("ar", 2), ("draft-4", 3), ("fused-4", 1)), (("verify-1", 1),)])
def test_passes_are_timed_until_two_agree(paused):
    """What disturbs one pass is not in the result, and wide passes are timed twice."""
    timer, plans = Timer(paused), probe_plans(4)
    times = measure(timer, plans)
    assert times.trunk == {1: 1, 2: 2, 5: 5} and times.lookahead == {2: 2, 5: 5, 9: 9, 25: 25}
    assert times.tail == pytest.approx({1: 0.1, 2: 0.2, 5: 0.5}) and times.drafting == pytest.approx({1: 0.2, 4: 0.5})
    for plan in plans:
        disturbed = any(name == plan.name for name, number in paused if number > 1)
        assert timer.count[plan.name] == (2 if plan.width > 8 else 4 if disturbed else 3)


@pytest.mark.parametrize("lookahead", range(1, 17))
def test_few_passes_show_all_widths(lookahead):
    plans = probe_plans(lookahead)
    assert len(plans) <= 8 and plans[0] == ar_plan() and draft_plan(lookahead) in plans
    full = fused_plan([lookahead] * (lookahead + 1))
    assert max(plan.width for plan in plans) == (full.width if full.width <= WIDEST else WIDEST)
    assert probe_plans(lookahead, 100) == [ar_plan()]


def test_another_kind_times_narrow_passes_alone(tiny_bundle):
    """Its trunk is that of the first kind, in proportion to how slow it is now."""
    asked = []

    def idle_pass(kind):
        asked.append(kind)
        row = {"greedy": 0.0, "sample": 0.1, "truncated": 0.2}[kind.sampler]
        tail = row * (kind.plan.width + 4 * kind.plan.next.drafts)
        return (kind.plan.width + bool(kind.plan.next.drafts)) * (1.0 if kind.sampler == "greedy" else 3.0), tail

    session = reciting_session(tiny_bundle)
    tuners = Tuners(session.manifest, session.backend.capabilities, idle_pass, lambda: 1000)
    first = tuners.get("greedy").times
    assert first.trunk == {1: 1, 2: 2, 5: 5, 7: 7} and first.lookahead == {2: 3, 7: 8, 16: 17, 49: 50}
    for sampler, row in (("sample", 0.1), ("truncated", 0.2)):
        asked.clear()
        times = tuners.get(sampler).times
        assert {kind.plan.name for kind in asked} == {"ar", "verify-6", "draft-1", "draft-6"}
        assert times.trunk == pytest.approx({width: 3 * width for width in first.trunk})
        assert times.lookahead == pytest.approx({width: 3 * (width + 1) for width in first.lookahead})
        for plan in (ar_plan(), verify_plan(3), draft_plan(4)):
            assert times.plan_seconds(plan) == pytest.approx(sum(idle_pass(PassKind(plan, 1, sampler))))
        fused = fused_plan([2, 1, 0])  # three targets and two drafts, of which each costs five rows
        assert times.plan_seconds(fused) == pytest.approx(3 * (fused.width + 1) + row * (3 + 5 * 2))
    assert tuners.get("sample").times is tuners.get("sample").times


@pytest.mark.parametrize("room", [0, 1, 2, 5, 7, 48])
def test_passes_are_timed_once_there_is_room_for_all_of_them(tiny_bundle, room):
    """Sequences near the end of the cache leave little room: nothing is timed then, and nothing concluded for later."""
    left = [room]
    session = reciting_session(tiny_bundle, slots=2)
    timed = []

    def idle_pass(kind):
        timed.append((kind.batch, kind.plan.width))
        return float(kind.plan.width), 0.1

    tuners = Tuners(session.manifest, session.backend.capabilities, idle_pass, lambda: left[0])
    for sampler, batch in (("greedy", 1), ("sample", 2)):
        assert tuners.get(sampler, batch) is None
        assert not tuners.known(sampler, batch)
    assert timed == []
    left[0] = 49
    first = tuners.get("greedy")
    assert first is not None and first.times.max_width == 49
    left[0] = room
    assert tuners.get("greedy") is first
    assert tuners.get("greedy", 2) is tuners.get("sample") is None and first.times.batched == {}
    left[0] = 49
    assert tuners.get("greedy", 2) is first and {*first.times.batched[2].lookahead} == {2, 7, 9, 25}
    sampled = tuners.get("sample", 2)
    assert sampled is not None and sampled.times.trunk.keys() == first.times.trunk.keys()


def test_windows_of_more_than_half_the_capacity_are_not_timed(tiny_bundle):
    for capacity, widest in ((4, 2), (8, 2), (12, 5), (16, 7), (32, 16), (64, 16), (96, 16), (100, 49)):
        sizes = replace(reciting_session(tiny_bundle).backend.capabilities, capacities=(capacity,))
        tuners = Tuners(read_manifest(tiny_bundle), sizes, lambda kind: (float(kind.plan.width), 0.1), lambda: 100)
        tuner = tuners.get("greedy")
        assert tuner is not None and tuner.times.max_width == widest
        assert all(plan.width <= capacity for one in tuner.candidates(6) for plan in one.cycle.plans)
    batches = replace(sizes, capacities=(64,), batch_sizes=(1, 2))
    left = [16]  # enough for the widest window of one slot, not for that of two
    tuners = Tuners(read_manifest(tiny_bundle), batches, lambda kind: (float(kind.plan.width), 0.1), lambda: left[0])
    assert tuners.get("greedy") is not None and tuners.get("greedy", 2) is None
    left[0] = 25
    assert tuners.get("greedy", 2) is not None
    padded = replace(sizes, capacities=(12,), least_width=8)  # one row, too, writes more than half of the KV capacity
    tuners = Tuners(read_manifest(tiny_bundle), padded, lambda kind: pytest.fail(kind), lambda: 12)
    assert tuners.get("greedy") is None


def test_a_large_batch_of_which_one_width_is_timed_counts_as_a_window(tiny_bundle):
    """One width says nothing about wider ones: they would look free."""
    sizes = replace(reciting_session(tiny_bundle).backend.capabilities, batch_sizes=(1, 32, 33))
    tuners = Tuners(read_manifest(tiny_bundle), sizes, lambda kind: (kind.batch * kind.plan.width, 0.1), lambda: 768)
    tuner = tuners.get("greedy", 33)
    assert tuner is not None and tuners.known("greedy", 33) and not tuners.known("greedy", 32)
    assert tuner.times.batched == {}
    assert tuner.plan_seconds(verify_plan(4), 33) > 4 * tuner.plan_seconds(ar_plan(), 33)
    tuners.get("greedy", 32)  # two rows a slot, and no more
    assert {*tuner.times.batched[32].trunk} == {1, 2} and {*tuner.times.batched[32].lookahead} == {2}
    for plan in (verify_plan(4), draft_plan(4), fused_plan([4] * 5)):
        assert tuner.plan_seconds(plan, 32) == pytest.approx(32 * plan.width + 0.1)
    assert tuner.decide(6, 32).cycle.name == tuner.decide(6, 33).cycle.name == "ar"


def test_times_between_the_measured_ones():
    times = PassTimes({1: 1.0, 5: 2.0, 9: 4.0}, {1: 0.5, 9: 0.9})
    assert times.seconds(3, 1) == pytest.approx(2.0)
    assert times.seconds(9, 5) == pytest.approx(4.7)
    assert times.seconds(17, 9) == pytest.approx(4 + 3 + 0.9)
    assert times.plan_seconds(fused_plan([1, 0])) == times.seconds(3, 3)
    assert times.plan_seconds(ar_plan()) == pytest.approx(1.5)


def test_points_that_do_not_say_how_long_a_pass_takes():
    assert between({4: 2.0}, 4) == 2.0
    for points in ({}, {4: 2.0}):
        with pytest.raises(ValueError, match="do not say how long one over 9 takes"):
            between(points, 9)
    assert between({1: 3.0, 5: 2.0}, 9) == 2.0  # wider windows are never quicker
    with pytest.raises(ValueError, match="257 tokens do not fit a KV capacity of 256"):
        Capabilities("cpu", 50, (64, 256), (1,)).capacity(257)


def test_one_width_with_lookahead_rows_moves_the_curve_of_those_without():
    times = PassTimes({1: 1.0, 5: 2.0}, {1: 0.1, 5: 0.5}, {5: 4.0}, {4: 0.9})
    assert times.plan_seconds(draft_plan(4)) == pytest.approx(4.0 + 0.9)
    assert times.plan_seconds(draft_plan(2)) == pytest.approx(3.5 + 0.5)
    assert times.plan_seconds(fused_plan([4] * 5)) == pytest.approx(9.0 + 0.9 + 0.4)


def test_passes_that_draft_have_curves_of_their_own():
    times = PassTimes({1: 1.0, 9: 2.0}, {1: 0.1, 9: 0.9}, {2: 3.0, 25: 26.0}, {1: 0.5, 4: 2.0})
    assert times.plan_seconds(verify_plan(4)) == pytest.approx(1.5 + 0.5)
    assert times.plan_seconds(draft_plan(4)) == pytest.approx(6.0 + 2.0)
    assert times.plan_seconds(fused_plan([1, 1])) == pytest.approx(5.0 + 0.5 + 0.1)
    assert times.plan_seconds(draft_plan(2), batch=2) == pytest.approx(7.0 + 2.0 + 0.1)
    free = PassTimes({1: 1.0, 25: 1.0}, {1: 0.0, 9: 0.0})
    measured = replace(times, batched={2: free})
    assert measured.plan_seconds(draft_plan(2), batch=2) == free.plan_seconds(draft_plan(2))
