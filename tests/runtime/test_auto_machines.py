"""The time of `auto` in simulated decoding, compared with plain decoding and with the best plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, product
from operator import mul
from statistics import geometric_mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import (
    MACHINES,
    DraftsAt,
    Machine,
    decoding_seconds,
    least_seconds,
    plain_seconds,
    text_seconds,
    tiled,
)

from pass_runtime.bundle.window import ar_window, verify_window
from pass_runtime.tuning import auto as auto_module
from pass_runtime.tuning.auto import Tuner

STATED = tuple(accumulate((0.6, 0.55, 0.5, 0.5), mul))
"""The acceptance that the bundle states: of the first 1, 2, 3, 4 drafts together."""
RATES = {
    "good": (0.75, 0.65, 0.55, 0.5),
    "fair": (0.5, 0.45, 0.4, 0.3),
    "none": (0.03, 0.03, 0.03, 0.03),
}
"""How often a draft is accepted if all drafts before it are."""
CHANGES = {
    "steady": lambda window, share: 1.0,
    "slower for a while": lambda window, share: 1.6 if 0.3 < share < 0.65 else 1.0,
    "busy: rows cost more": lambda window, share: 1 + 0.02 * (window.width - 1) * (share > 0.4),
    "drafting takes longer than timed": lambda window, share: 1.25 if window.groups else 1.0,
    "longer texts": lambda window, share: 1 + 0.5 * ((10 * share) % 1.0),
}
"""The factor on the seconds of a pass when `share` of the tokens is written."""
TOKENS = 700


@pytest.fixture(autouse=True)
def decisions_may_take_any_time(monkeypatch):
    monkeypatch.setattr(auto_module, "DECISION_TIME_SHARE", 1e9)


@cache
def relative_times(rates: str, change: str) -> tuple[list[float], list[float]]:
    to_best, to_plain = [], []
    for seed, machine in enumerate(MACHINES.values()):
        noisy = replace(machine, noise=0.03, pauses=0.005)
        options = {"seed": seed, "change": CHANGES[change]}
        tuner = Tuner(noisy.times(), 4, STATED)
        seconds = decoding_seconds(noisy, tuner, RATES[rates], TOKENS, **options)
        plain = plain_seconds(noisy, TOKENS, **options)
        # The best plan is timed without noise, so the effect of the noise is divided out.
        noise = plain / plain_seconds(machine, TOKENS, **options)
        best = least_seconds(machine, RATES[rates], TOKENS, **options)
        to_best.append(seconds / noise / best)
        to_plain.append(seconds / plain)
    return to_best, to_plain


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rates", RATES)
def test_auto_takes_little_more_time_than_the_best_plan(rates, change):
    to_best, to_plain = relative_times(rates, change)
    assert geometric_mean(to_best) < 1.04
    assert max(to_plain) < 1.06


def test_on_the_average_of_all_cases_auto_is_nearly_as_fast_as_the_best_plan():
    to_best = [relative_times(*case)[0] for case in product(RATES, CHANGES)]
    assert geometric_mean(chain(*to_best)) < 1.02


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    row=st.floats(0.1, 0.6),
    tile=st.sampled_from([1, 2]),
    adapter=st.floats(0.0, 0.5),
    noise=st.sampled_from([0.01, 0.05, 0.1]),
    seed=st.integers(0, 99),
)
def test_little_time_is_lost_if_no_draft_is_ever_accepted(row, tile, adapter, noise, seed):
    machine = Machine(tiled(1.0, tile, row), adapter, 0.0, 0.1, 0.02, 0.05, noise, 0.005)
    tuner = Tuner(machine.times(), 4, STATED)
    seconds = decoding_seconds(machine, tuner, (0.0,) * 4, TOKENS, seed)
    assert seconds < 1.08 * plain_seconds(machine, TOKENS, seed)


def text_with_drafts(right: int, tokens: int = 128) -> list[DraftsAt]:
    """Every token follows an n-gram match; of four drafts of either kind, `right` are right."""
    return [DraftsAt(right, 1 + i % 3, 4, right) for i in range(tokens)]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize(("tokens", "limit"), [(128, 1.17), (1024, 1.08)])
def test_auto_learns_that_all_drafts_of_a_text_are_wrong(machine, tokens, limit):
    tuner = Tuner(machine.times(), 4, STATED)
    for _ in range(3):
        text_seconds(machine, tuner, text_with_drafts(right=4))
    seconds = text_seconds(machine, tuner, text_with_drafts(0, tokens))
    assert seconds < limit * tokens * machine.seconds(ar_window())


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("texts_before", [[], [text_with_drafts(right=0)]], ids=["first", "later"])
def test_auto_gains_most_of_what_right_drafts_can_save(machine, texts_before):
    plain = machine.seconds(ar_window())
    best = min(machine.seconds(verify_window(drafts)) / (drafts + 1) for drafts in range(1, 5))
    tuner = Tuner(machine.times(), 4, STATED)
    for text in texts_before:
        text_seconds(machine, tuner, text)
    seconds_per_token = text_seconds(machine, tuner, text_with_drafts(right=4)) / 128
    assert plain - seconds_per_token > 0.75 * (plain - best)
