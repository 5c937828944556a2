from __future__ import annotations

from itertools import groupby

import pytest
from machines import EXPENSIVE_ROWS, FREE_ROWS, HEAD, fixed_times, timed, times_by_rows
from reciting import reciting_session, windows_run, wrong

from pass_runtime.backends.base import Drafts
from pass_runtime.bundle.plan import make_plan
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import (
    COPY_DRAFTS,
    ar_window,
    copy_window,
    draft_window,
    fused_window,
    verify_window,
)
from pass_runtime.options import GenerateOptions
from pass_runtime.tuning import auto as auto_module
from pass_runtime.tuning.auto import (
    Auto,
    PassTimes,
    Rates,
    Tuner,
    shape_of,
    stated_acceptance,
)

GOOD = (0.7, 0.45, 0.2, 0.06)
"""The acceptance that a bundle states: how often the first 1, 2, 3, 4 drafts are all accepted."""


@pytest.fixture
def slow_passes(monkeypatch):
    """The passes of a tiny model are so fast that `auto` would decide rarely."""
    monkeypatch.setattr(auto_module, "DECISION_TIME_SHARE", 100.0)


@pytest.mark.parametrize(
    ("times", "stated", "lookahead", "plan"),
    [
        (EXPENSIVE_ROWS, GOOD, 4, make_plan("ar", 0)),
        (FREE_ROWS, GOOD, 4, make_plan("fused", 4)),
        (FREE_ROWS, GOOD, 2, make_plan("fused", 2)),
        (FREE_ROWS, GOOD, 0, make_plan("ar", 0)),
        (fixed_times({1: 1.0, 25: 2.5}), (), 4, make_plan("ar", 0)),
    ],
    ids=["expensive rows", "free rows", "a limit", "no drafts", "no stated acceptance"],
)
def test_the_plan_suits_the_machine_and_the_request(times, stated, lookahead, plan):
    assert Tuner(times, 4, stated).decide(lookahead).plan == plan


def test_cheap_rows_mean_smaller_groups():
    times = fixed_times({1: 1.0, 25: 3.0})
    window = Tuner(times, 4, GOOD).decide(4).plan.windows[0]
    assert window.is_fused and window.width < 20
    assert window.groups[0] == window.drafts and list(window.groups) == sorted(
        window.groups, reverse=True
    )


@pytest.mark.parametrize(("draft_factor", "is_kept"), [(1.0, True), (3.0, False)])
def test_a_plan_that_takes_longer_than_it_promised_is_given_up(draft_factor, is_kept):
    seconds_by_rows = {1: 1.0, 25: 1.3}
    tuner, promised = Tuner(times_by_rows(seconds_by_rows), 4, GOOD), fixed_times(seconds_by_rows)
    first = tuner.decide(4).plan
    assert first.drafts
    for _ in range(30):
        for window in (ar_window(), *first.windows):
            seconds = 5.0 * promised.seconds(shape_of(window))
            tuner.observe(window, 1, seconds * (draft_factor if window.drafts else 1.0))
    assert (tuner.decide(4).plan == first) is is_kept


def test_auto_keeps_its_plan_until_another_is_clearly_better():
    tuner = Tuner(fixed_times({1: 1.0, 25: 3.0}), 4, GOOD)
    first = tuner.decide(4)
    for _ in range(3):
        tuner.rates.lookahead.record(4, 2)
        assert tuner.decide(4).plan.windows[0].is_fused
    for _ in range(400):  # a text whose drafts are all wrong
        tuner.rates.lookahead.record(first.plan.drafts, 0)
    assert tuner.decide(4).plan.name == "ar"
    for _ in range(20_000):  # the rates return to those that the bundle states
        tuner.rates.lookahead.forget()
    assert tuner.decide(4).plan.windows[0].is_fused


def test_a_plan_that_did_not_run_lately_is_tried_for_a_few_passes(slow_passes):
    tuner, names = Tuner(FREE_ROWS, 4, GOOD), []

    def run(lookahead, passes):
        for _ in range(passes):
            window = tuner.choose(lookahead, 1).plan.windows[0]
            names.append(window.name)
            tuner.observe(window, 1, 1.0)

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
    tuner.choose(3, 1)
    for _ in range(200):
        window = tuner.choose(4, 1).plan.windows[0]
        factor = 0.8 if window.name == "fused-4" else 1.0
        tuner.observe(window, 1, true_times.seconds(shape_of(window)) * factor)
    assert tuner.decided.plan == make_plan("fused", 4)


def test_a_sequence_has_ngram_acceptance_of_its_own():
    of_all = Tuner(FREE_ROWS, 4, GOOD).rates
    three, two = (Drafts((1, 2), "ngram", confidence) for confidence in (3, 2))
    for drafted, accepted in ((4, 3), (4, 4), (2, 0)):
        of_all.of(three).record(drafted, accepted)
    own = Rates(of_all)
    for drafted, accepted in ((4, 0), (3, 0), (4, 1)):
        own.of(three).record(drafted, accepted)
    own.of(three).forget()
    expected = [0.7917745256, 0.8583926329, 0.8583926329, 0.7750941817, 0.8297254709]
    expected += [0.83] * 11
    assert of_all.of(three).rates == pytest.approx(expected)
    assert own.of(three).rates == pytest.approx([0.4489827150, 0.4294645641, *expected[2:]])
    assert own.of(two).rates == pytest.approx([0.7, *[0.8] * 15])
    assert own.of(Drafts((1,), "grammar")).rates == pytest.approx([0.98] * 16)


def test_windows_for_copies_are_those_of_the_cpp_runtime():
    tuner = Tuner(HEAD.times(), 4, GOOD)
    windows = [*map(verify_window, range(1, 5)), *map(copy_window, COPY_DRAFTS)]
    by_first_window = {choice.plan.windows[0]: choice for choice in tuner.choices(4)}

    def chosen(first, next_of_plan, proposed):
        """proposed: the confidence and number of each text's copied drafts."""
        drafts = [each and Drafts((0,) * each[1], "ngram", each[0]) for each in proposed]
        window = tuner.verifying(
            by_first_window[first],
            len(drafts),
            [(each, Rates(tuner.rates)) for each in drafts],
            next_of_plan,
            windows,
        )
        return window and window.name

    ar, draft, fused = ar_window(), draft_window(2), fused_window([2, 2, 2])
    plans = [(ar, ar), (draft, draft), (draft, verify_window(2)), (fused, fused)]
    texts = [[(5, 16)], [(3, 16)], [(1, 16)], [(5, 3)], [(4, 16), None], [(1, 16), (2, 16)]]
    assert [[chosen(*plan, text) for plan in plans] for text in texts] == [
        ["copy-8", "copy-8", "copy-8", "copy-8"],
        ["verify-4", "verify-4", "verify-4", "verify-4"],
        ["verify-3", "verify-3", None, "verify-2"],
        ["verify-3", "verify-3", "verify-3", "verify-3"],
        [None, "verify-2", None, "verify-3"],
        [None, "verify-2", None, "verify-2"],
    ]


def test_each_sampler_starts_from_the_acceptance_stated_for_it(tiny_bundle):
    session = reciting_session(tiny_bundle)
    rates = {"acceptance_per_position": (0.5, 0.4), "acceptance_per_position_sampled": (0.3, 0.03)}
    stated = session.manifest.lookahead.model_copy(update=rates)
    assert stated_acceptance(stated, "greedy") == (0.5, 0.4)
    for sampler in ("sample", "truncated"):
        assert stated_acceptance(stated, sampler) == (0.3, 0.03)
    greedy_alone = stated.model_copy(update={"acceptance_per_position_sampled": ()})
    derived = Tuner(FREE_ROWS, 4, stated_acceptance(greedy_alone, "sample")).rates.lookahead
    greedy = Tuner(FREE_ROWS, 4, (0.5, 0.4)).rates.lookahead
    assert derived.rates[:2] == pytest.approx([0.6 * rate for rate in greedy.rates[:2]])
    auto = Auto(stated, session.backend.capabilities)
    for sampler, rates in (("greedy", [0.5, 0.8]), ("truncated", [0.3, 0.1])):
        tuner = timed(auto, sampler, time_pass=lambda batch: (1.0, 1.0))
        assert tuner.rates.lookahead.rates[:2] == pytest.approx(rates)


def auto_run(session, times: PassTimes, tokens: int, acceptance=(), draft=None):
    names = windows_run(session)
    tuner = Tuner(times, 6, acceptance)
    session._engine.auto._tuners["greedy"] = tuner
    options = GenerateOptions(tokens, ignore_eos=True, draft=draft)
    return session.generate_ids([5, 6], options).result(), names, tuner


def test_auto_gives_up_drafts_that_are_always_wrong(tiny_bundle, slow_passes):
    session, times = reciting_session(tiny_bundle, drafter=wrong), fixed_times({1: 1.0, 49: 4.0})
    stream, names, _ = auto_run(session, times, 300, GOOD, draft="lookahead")
    assert names[0].startswith("fused") and names[-1] == "ar"
    assert stream.stats.accepted == 0


def test_a_text_that_repeats_is_drafted_by_its_ngrams(tiny_bundle):
    def every_nine(position: int) -> int:
        return 10 + position % 9

    session = reciting_session(tiny_bundle, target=every_nine, drafter=wrong)
    stream, names, tuner = auto_run(session, fixed_times({1: 1.0, 49: 4.0}), 100, draft="ngram")
    assert stream.token_ids == [every_nine(position) for position in range(2, 102)]
    assert names[:11] == ["ar"] * 11 and names[-1] == "copy-16"
    assert stream.stats.tau > 3 and max(tuner.rates.by_confidence[5].rates) > 0.8


EIGHT_FREE_ROWS = fixed_times({1: 1.0, 8: 1.1, 16: 2.0, 64: 8.0})
"""Up to eight rows take about the same time; more rows take time in proportion."""


def test_drafts_of_a_batch_cost_more_where_rows_do():
    tuner = Tuner(EIGHT_FREE_ROWS, 4, GOOD)
    assert tuner.decide(4, batch=1).plan.drafts > 0
    assert Tuner(EIGHT_FREE_ROWS, 4, GOOD).decide(4, batch=8).plan.name == "ar"
    rates = [max(tuner.choices(4, batch), key=lambda c: c.rate).rate for batch in (1, 2, 4, 8)]
    assert rates == sorted(rates, reverse=True)


def test_the_decision_for_a_batch_that_was_timed_follows_its_own_times():
    tuner = Tuner(fixed_times({1: 1.0, 50: 1.0}), 4, GOOD)
    tuner.times_by_batch[8] = fixed_times({8: 1.0, 200: 25.0})
    assert tuner.decide(4, batch=8).plan.name == "ar"
    assert tuner.decide(4, batch=2).plan.drafts == 4


def test_decisions_are_kept_by_lookahead_and_batch():
    tuner = Tuner(EIGHT_FREE_ROWS, 4, GOOD)
    alone, of_eight = tuner.choose(4, 1), tuner.choose(4, 8)
    assert alone.plan.drafts > 0 and of_eight.plan.name == "ar"
    assert tuner.choose(4, 1) == alone
    assert tuner.choose(2, 1).plan.drafts <= 2


def test_every_sequence_has_an_acceptance_of_its_own():
    tuner = Tuner(fixed_times({1: 1.0, 25: 2.0}), 4, GOOD)
    good, bad = Rates(tuner.rates), Rates(tuner.rates)
    for _ in range(300):
        good.lookahead.record(4, 4)
        bad.lookahead.record(4, 0)
    assert bad.lookahead.rates[0] < 0.2 < 0.9 < good.lookahead.rates[0]
    assert tuner.rates.lookahead.rates == Rates(tuner.rates).lookahead.rates
    assert tuner.decide(4, 1, [bad]).plan.name == "ar"
    assert tuner.decide(4, 1, [good]).plan.drafts == 4
    of_good = [c.tokens for c in tuner.choices(4, 2, good.lookahead.cumulative)]
    tuner.decide(4, 2, [good, bad])
    assert 1 < tuner.decided.tokens < max(of_good)


@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_decisions_take_at_most_a_hundredth_of_the_time(monkeypatch, lookahead):
    """A decision takes 25 ms here and a pass 1 or 2 ms, so that decisions have to be rare."""
    clock = [0.0]
    monkeypatch.setattr(auto_module.time, "perf_counter", lambda: clock[0])
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
        window = tuner.choose(lookahead, 1).plan.windows[0]
        tuner.observe(window, 1, times.seconds(shape_of(window)))
        decoding += times.seconds(shape_of(window))
    assert len(decisions) > 5
    assert clock[0] <= 0.01 * decoding + 0.025  # the first decision precedes all passes


def test_after_a_warm_up_no_request_waits_for_timing(tiny_bundle):
    session = reciting_session(tiny_bundle, slots=5)
    session.warm_up()
    timed_passes, time_pass = [], session._engine.time_pass

    def record(batch):
        timed_passes.append(batch)
        return time_pass(batch)

    session._engine.time_pass = record
    for temperature in (0.0, 1.0):
        options = GenerateOptions(8, SamplingParams(temperature, seed=1), ignore_eos=True)
        for count in range(1, 6):
            for generation in session.generate_all([5, 6, 7], [options] * count):
                generation.result()
    assert timed_passes == []
    options = GenerateOptions(8, SamplingParams(1.0, top_k=5, seed=1), ignore_eos=True)
    session.generate([5, 6, 7], options).result()
    assert timed_passes
