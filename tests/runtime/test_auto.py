"""What the mode `auto` decides for given pass times and acceptance rates, and when it times passes.

`Tuner.decide` returns the best candidate; `next_candidate` is what the scheduler calls, and now and
then returns another one on trial."""

from __future__ import annotations

from itertools import groupby

import pytest
from machines import EXPENSIVE_ROWS, FREE_ROWS, fixed_times, times_by_rows
from reciting import plans_run, reciting_session, right_unless, words, wrong

from pass_runtime.bundle.plan import ar_plan, make_cycle
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning import tuner as tuner_module
from pass_runtime.tuning.estimates import PassTimes, cumulative_acceptance, shape_of
from pass_runtime.tuning.tuner import Tuner, Tuners, stated_acceptance

GOOD = (0.7, 0.45, 0.2, 0.06)
"""The acceptance that a bundle states: how often the first 1, 2, 3, 4 drafts are all accepted."""


@pytest.fixture
def slow_passes(monkeypatch):
    """Let decisions take any share of the time, as they would take little of it with a real model:
    a tiny one's passes are so fast that `auto` would decide rarely."""
    monkeypatch.setattr(tuner_module, "DECISION_TIME_SHARE", 100.0)


def test_expensive_rows_mean_plain_decoding():
    assert Tuner(EXPENSIVE_ROWS, 4, GOOD).decide(4).cycle.name == "ar"


def test_free_rows_mean_full_groups():
    candidate = Tuner(FREE_ROWS, 4, GOOD).decide(4)
    assert candidate.cycle == make_cycle("fused", 4)
    assert candidate.tokens == pytest.approx(1 + sum(GOOD))


def test_cheap_rows_mean_smaller_groups():
    times = fixed_times({1: 1.0, 25: 3.0})
    plan = Tuner(times, 4, GOOD).decide(4).cycle.plans[0]
    assert plan.is_fused and plan.width < 20
    assert plan.groups[0] == plan.drafts and list(plan.groups) == sorted(plan.groups, reverse=True)


def test_narrow_windows_are_chosen_if_only_they_are_cheap():
    candidate = Tuner(fixed_times({1: 1.0, 5: 1.0, 7: 50.0}), 4, (0.9, 0.8, 0.7, 0.6)).decide(4)
    assert candidate.cycle.name in ("two-pass", "fused:1,0", "fused-1", "fused")


def test_a_requests_lookahead_is_a_limit():
    tuner = Tuner(FREE_ROWS, 4, GOOD)
    assert tuner.decide(2).cycle == make_cycle("fused", 2)
    assert tuner.decide(0).cycle.name == "ar"
    assert tuner.decide(4).cycle == make_cycle("fused", 4)


def test_drafts_without_a_stated_acceptance_are_not_used_where_rows_cost_time():
    assert Tuner(fixed_times({1: 1.0, 25: 2.5}), 4, ()).decide(4).cycle.name == "ar"


@pytest.mark.parametrize(("draft_factor", "is_kept"), [(1.0, True), (3.0, False)])
def test_a_plan_that_takes_longer_than_it_promised_is_given_up(draft_factor, is_kept):
    """If all passes become slower, by 5 here, the decision stays."""
    seconds_by_rows = {1: 1.0, 25: 1.3}
    tuner, promised = Tuner(times_by_rows(seconds_by_rows), 4, GOOD), fixed_times(seconds_by_rows)
    first = tuner.decide(4).cycle
    assert first.depth
    for _ in range(30):
        for plan in (ar_plan(), *first.plans):
            seconds = 5.0 * promised.seconds(shape_of(plan))
            tuner.observe(plan, 1, seconds * (draft_factor if plan.drafts else 1.0))
    assert (tuner.decide(4).cycle == first) is is_kept


def test_one_very_slow_pass_hardly_changes_an_estimate():
    tuner = Tuner(times_by_rows({1: 1.0, 25: 1.0}), 4, GOOD)
    tuner.observe(ar_plan(), 1, 1.0)
    tuner.observe(ar_plan(), 1, 500.0)
    tuner.decide(4)
    assert tuner.plan_seconds(ar_plan()) < 1.07


def test_auto_keeps_its_plan_until_another_is_clearly_better():
    tuner = Tuner(fixed_times({1: 1.0, 25: 3.0}), 4, GOOD)
    first = tuner.decide(4)
    for _ in range(3):
        tuner.lookahead_acceptance.record(4, 2)
        assert tuner.decide(4).cycle.plans[0].is_fused
    for _ in range(400):  # a text whose drafts are all wrong
        tuner.lookahead_acceptance.record(first.cycle.depth, 0)
    assert tuner.decide(4).cycle.name == "ar"
    for _ in range(20_000):  # the rates return to those that the bundle states
        tuner.lookahead_acceptance.forget()
    assert tuner.decide(4).cycle.plans[0].is_fused


def test_a_plan_that_did_not_run_lately_is_tried_for_a_few_passes(slow_passes):
    """That is a plan that promises as much as the plan in use; and plain decoding sooner, whatever
    it promises."""
    tuner, names = Tuner(FREE_ROWS, 4, GOOD), []

    def run(lookahead, passes):
        for _ in range(passes):
            plan = tuner.next_candidate(lookahead, 1, []).cycle.plans[0]
            names.append(plan.name)
            tuner.observe(plan, 1, 1.0)

    run(3, 1)
    run(4, 40)  # four drafts promise 2 % more than three, which is not enough for a change
    expected = ["fused-3"] + ["fused-4"] * 4 + ["fused-3"] * 8 + ["ar"] * 4 + ["fused-3"] * 24
    assert names == expected
    run(4, 1955)
    runs = [(name, len(list(passes))) for name, passes in groupby(names[17:])][:-1]
    assert {name for name, _ in runs} == {"fused-3", "ar"}
    assert {length for name, length in runs if name == "ar"} == {4}
    assert all(128 <= length <= 140 for name, length in runs if name == "fused-3")
    run(4, 60)
    assert names[1996:].count("fused-4") == 4


def test_a_plan_that_is_faster_than_estimated_is_chosen_after_a_trial(slow_passes):
    estimated, true_times = times_by_rows({1: 1.0, 25: 1.0}), fixed_times({1: 1.0, 25: 1.0})
    tuner = Tuner(estimated, 4, GOOD)
    tuner.next_candidate(3, 1, [])
    for _ in range(200):
        plan = tuner.next_candidate(4, 1, []).cycle.plans[0]
        factor = 0.8 if plan.name == "fused-4" else 1.0
        tuner.observe(plan, 1, true_times.seconds(shape_of(plan)) * factor)
    assert tuner.decided.cycle == make_cycle("fused", 4)


def test_observed_rates_converge_to_the_true_ones():
    acceptance = Tuner(FREE_ROWS, 4, GOOD).lookahead_acceptance
    for number in range(3000):
        acceptance.record(4, (0, 1, 1, 4)[number % 4])
    assert acceptance.rates == pytest.approx([3 / 4, 1 / 3, 1, 1], abs=0.03)


def test_a_sequence_has_ngram_acceptance_of_its_own():
    """It changes faster than that of all sequences together. The C++ runtime is tested with the
    same figures (runtime/cpp/tests/parts_test.cpp)."""
    tuner, own = Tuner(FREE_ROWS, 4, GOOD), {}
    for drafted, accepted in ((4, 3), (4, 4), (2, 0)):
        tuner.ngram(3).record(drafted, accepted)
    for drafted, accepted in ((4, 0), (3, 0), (4, 1)):
        tuner.ngram(3, own).record(drafted, accepted)
    tuner.ngram(3, own).forget()
    of_all = [0.6150567217, 0.6668061951, 0.6668061951, 0.5835077438]
    assert tuner.ngram(3).rates == pytest.approx(of_all)
    assert tuner.ngram(3, own).rates == pytest.approx([0.4467939632, 0.4446763813, *of_all[2:]])
    assert tuner.ngram(2, own).rates == pytest.approx([0.6] * 4)


def test_each_sampler_starts_from_the_acceptance_stated_for_it(tiny_bundle):
    session = reciting_session(tiny_bundle)
    rates = {"acceptance_per_position": (0.5, 0.4), "acceptance_per_position_sampled": (0.3, 0.03)}
    stated = session.manifest.lookahead.model_copy(update=rates)
    assert stated_acceptance(stated, "greedy") == (0.5, 0.4)
    for sampler in ("sample", "truncated"):
        assert stated_acceptance(stated, sampler) == (0.3, 0.03)
    greedy_alone = stated.model_copy(update={"acceptance_per_position_sampled": ()})
    derived = Tuner(FREE_ROWS, 4, stated_acceptance(greedy_alone, "sample")).lookahead_acceptance
    greedy = Tuner(FREE_ROWS, 4, (0.5, 0.4)).lookahead_acceptance
    assert derived.rates[:2] == pytest.approx([0.6 * rate for rate in greedy.rates[:2]])
    manifest = session.manifest.model_copy(update={"lookahead": stated})
    tuners = Tuners(manifest, session.backend.capabilities, lambda kind: (1.0, 1.0), lambda: 1000)
    assert tuners.get("greedy").lookahead_acceptance.rates[:2] == pytest.approx([0.5, 0.8])
    assert tuners.get("truncated").lookahead_acceptance.rates[:2] == pytest.approx([0.3, 0.1])


def auto_run(session, times: PassTimes, tokens: int, acceptance=(), draft=None):
    """Run a greedy request with `auto` by these times. Return its finished stream, the names of the
    plans that its passes had, and its tuner."""
    names = plans_run(session)
    tuner = Tuner(times, 6, acceptance)
    session._tuners._tuners["greedy"] = tuner
    options = GenerateOptions(tokens, ignore_eos=True, draft=draft)
    return session.generate_ids([5, 6], options).result(), names, tuner


@pytest.mark.parametrize(
    "drafter", [words, wrong, right_unless(lambda position: position % 3 == 0)]
)
@pytest.mark.parametrize(
    "times",
    [
        FREE_ROWS,
        EXPENSIVE_ROWS,
        fixed_times({1: 1.0, 25: 1.6}, lambda rows: 0.1 + 0.0125 * (rows - 1)),
    ],
)
def test_auto_never_changes_the_text(tiny_bundle, drafter, times):
    stream, _, _ = auto_run(reciting_session(tiny_bundle, drafter=drafter), times, 200, GOOD)
    assert stream.token_ids == [words(position) for position in range(2, 202)]


def test_auto_gives_up_drafts_that_are_always_wrong(tiny_bundle, slow_passes):
    session, times = reciting_session(tiny_bundle, drafter=wrong), fixed_times({1: 1.0, 49: 4.0})
    stream, names, _ = auto_run(session, times, 300, GOOD, draft="lookahead")
    assert names[0].startswith("fused") and names[-1] == "ar"
    assert stream.stats.accepted == 0


def test_auto_uses_more_drafts_if_they_are_better_than_stated(tiny_bundle, slow_passes):
    session, times = reciting_session(tiny_bundle), fixed_times({1: 1.0, 49: 4.0})
    stream, names, _ = auto_run(session, times, 600, (0.6, 0.4, 0.2), draft="lookahead")
    assert names[-1] not in names[:10] and stream.stats.tau > 2.5


def test_a_text_that_repeats_is_drafted_by_its_ngrams(tiny_bundle):
    def every_nine(position: int) -> int:
        return 10 + position % 9

    session = reciting_session(tiny_bundle, target=every_nine, drafter=wrong)
    stream, names, tuner = auto_run(session, fixed_times({1: 1.0, 49: 4.0}), 100, draft="ngram")
    assert stream.token_ids == [every_nine(position) for position in range(2, 102)]
    assert names[:11] == ["ar"] * 11 and names[-1] == "verify-6"
    assert stream.stats.tau > 3 and max(tuner.ngram_acceptance[4].rates) > 0.8


EIGHT_FREE_ROWS = fixed_times({1: 1.0, 8: 1.1, 16: 2.0, 64: 8.0})
"""Up to eight rows take about the same time; more rows take time in proportion."""


def test_drafts_of_a_batch_cost_more_where_rows_do():
    """Eight sequences have a row each, and so leave none of the free rows to drafts."""
    tuner = Tuner(EIGHT_FREE_ROWS, 4, GOOD)
    assert tuner.decide(4, batch=1).cycle.depth > 0
    assert Tuner(EIGHT_FREE_ROWS, 4, GOOD).decide(4, batch=8).cycle.name == "ar"
    rates = [max(tuner.candidates(4, batch), key=lambda c: c.rate).rate for batch in (1, 2, 4, 8)]
    assert rates == sorted(rates, reverse=True)


def test_the_decision_for_a_batch_that_was_timed_follows_its_own_times():
    tuner = Tuner(fixed_times({1: 1.0, 50: 1.0}), 4, GOOD)
    tuner.times_by_batch[8] = fixed_times({8: 1.0, 200: 25.0})
    assert tuner.decide(4, batch=8).cycle.name == "ar"
    assert tuner.decide(4, batch=2).cycle.depth == 4


def test_decisions_are_kept_by_lookahead_and_batch():
    tuner = Tuner(EIGHT_FREE_ROWS, 4, GOOD)
    alone, of_eight = tuner.next_candidate(4, 1, []), tuner.next_candidate(4, 8, [])
    assert alone.cycle.depth > 0 and of_eight.cycle.name == "ar"
    assert tuner.next_candidate(4, 1, []) == alone
    assert tuner.next_candidate(2, 1, []).cycle.depth <= 2


def test_every_sequence_has_an_acceptance_of_its_own():
    """A sequence that drafts badly is decoded plainly; a batch uses the mean of its sequences."""
    tuner = Tuner(fixed_times({1: 1.0, 25: 2.0}), 4, GOOD)
    good, bad = tuner.new_acceptance(), tuner.new_acceptance()
    for _ in range(300):
        good.record(4, 4)
        bad.record(4, 0)
    assert bad.rates[0] < 0.2 < 0.9 < good.rates[0]
    assert tuner.lookahead_acceptance.rates == tuner.new_acceptance().rates
    assert tuner.decide(4, 1, [bad]).cycle.name == "ar"
    assert tuner.decide(4, 1, [good]).cycle.depth == 4
    of_good = [c.tokens for c in tuner.candidates(4, 2, cumulative_acceptance(good.rates))]
    tuner.decide(4, 2, [good, bad])
    assert 1 < tuner.decided.tokens < max(of_good)


@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_decisions_take_at_most_a_hundredth_of_the_time(monkeypatch, lookahead):
    """A decision takes 25 ms here and a pass 1 or 2 ms, so that decisions have to be rare."""
    clock = [0.0]
    monkeypatch.setattr(tuner_module.time, "perf_counter", lambda: clock[0])
    times = fixed_times({1: 1e-3, 81: 2e-3})
    tuner = Tuner(times, lookahead, GOOD[:lookahead])
    decide, decisions = tuner.decide, []

    def decide_slowly(*arguments):
        clock[0] += 0.025
        decisions.append(arguments)
        return decide(*arguments)

    tuner.decide = decide_slowly  # type: ignore[method-assign]
    decoding = 0.0
    while decoding < 60.0:
        plan = tuner.next_candidate(lookahead, 1, []).cycle.plans[0]
        tuner.observe(plan, 1, times.seconds(shape_of(plan)))
        decoding += times.seconds(shape_of(plan))
    assert len(decisions) > 5
    assert clock[0] <= 0.01 * decoding + 0.025  # the first decision precedes all passes


def test_after_a_warm_up_no_request_waits_for_timing(tiny_bundle):
    """Greedy or sampled, in batches of every size; truncated sampling is timed at its first use."""
    session = reciting_session(tiny_bundle, slots=5)
    session.warm_up()
    timed_passes, time_masked_pass = [], session._tuners._time_masked_pass

    def record(kind):
        timed_passes.append(kind)
        return time_masked_pass(kind)

    session._tuners._time_masked_pass = record
    for temperature in (0.0, 1.0):
        options = GenerateOptions(8, SamplingParams(temperature, seed=1), ignore_eos=True)
        for count in range(1, 6):
            for generation in session.generate_all([5, 6, 7], [options] * count):
                generation.result()
    assert timed_passes == []
    options = GenerateOptions(8, SamplingParams(1.0, top_k=5, seed=1), ignore_eos=True)
    session.generate([5, 6, 7], options).result()
    assert timed_passes
