"""How long `auto` takes on machines that are formulas: against plain decoding and the best plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, chain, product
from operator import mul
from statistics import geometric_mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import MACHINES, Machine, Place, decode, fastest, plainly, replay, steps

from pass_runtime.bundle.plan import ar_plan, verify_plan
from pass_runtime.tuning import tuner as tuner_module
from pass_runtime.tuning.tuner import Tuner

STATED = tuple(accumulate((0.6, 0.55, 0.5, 0.5), mul))
RATES = {
    "good": (0.75, 0.65, 0.55, 0.5),
    "fair": (0.5, 0.45, 0.4, 0.3),
    "none": (0.03, 0.03, 0.03, 0.03),
}
CHANGES = {
    "steady": lambda plan, share: 1.0,
    "slower for a while": lambda plan, share: 1.6 if 0.3 < share < 0.65 else 1.0,
    "busy: rows cost more": lambda plan, share: 1 + 0.02 * (plan.width - 1) * (share > 0.4),
    "drafting takes longer than timed": lambda plan, share: 1.25 if plan.groups else 1.0,
    "longer texts": lambda plan, share: 1 + 0.5 * ((10 * share) % 1.0),
}
TOKENS = 700


@pytest.fixture(autouse=True)
def decisions_take_no_time(monkeypatch):
    monkeypatch.setattr(tuner_module, "DECISION_TIME_SHARE", 1e9)


@cache
def against(rates: str, change: str) -> tuple[list[float], list[float]]:
    """By machine: the time of `auto` relative to the best plan, and relative to plain decoding."""
    best, plain = [], []
    for seed, machine in enumerate(MACHINES.values()):
        noisy = replace(machine, noise=0.03, pauses=0.005)
        more = {"seed": seed, "change": CHANGES[change]}
        spent = decode(noisy, Tuner(noisy.times(), 4, STATED), RATES[rates], TOKENS, **more)
        plainly_spent = plainly(noisy, TOKENS, **more)
        noise = plainly(machine, TOKENS, **more) / plainly_spent
        best.append(noise * spent / fastest(machine, RATES[rates], TOKENS, **more))
        plain.append(spent / plainly_spent)
    return best, plain


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("rates", RATES)
def test_auto_takes_little_more_time_than_the_best_plan(rates, change):
    """In the mean over machines, and never much more than plain decoding."""
    best, plain = against(rates, change)
    assert geometric_mean(best) < 1.04
    assert max(plain) < 1.06


def test_auto_takes_hardly_more_than_the_best_plan_on_average():
    """Of all plans, on the menu or not; `auto` does not know the costs and rates beforehand."""
    best = [against(*case)[0] for case in product(RATES, CHANGES)]
    assert geometric_mean(chain(*best)) < 1.02


@settings(derandomize=True, deadline=None, max_examples=12)
@given(
    row=st.floats(0.1, 0.6),
    tile=st.sampled_from([1, 2]),
    adapter=st.floats(0.0, 0.5),
    noise=st.sampled_from([0.01, 0.05, 0.1]),
    seed=st.integers(0, 99),
)
def test_where_drafts_do_not_pay_little_is_lost(row, tile, adapter, noise, seed):
    """Drafts are stated to be good and are never accepted."""
    machine = Machine(steps(1.0, tile, row), adapter, 0.0, 0.1, 0.02, 0.05, noise, 0.005)
    spent = decode(machine, Tuner(machine.times(), 4, STATED), (0.0,) * 4, TOKENS, seed)
    assert spent < 1.08 * plainly(machine, TOKENS, seed)


def text(survive: int, tokens: int = 128) -> list[Place]:
    """Every token follows an n-gram match; `survive` of four drafts of either source are right."""
    return [Place(survive, 2 + at % 3, 4, survive) for at in range(tokens)]


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
def test_a_text_whose_drafts_never_survive(costs):
    """`auto` learns it, although in the texts before it all drafts survived."""
    for tokens, limit in ((128, 1.17), (1024, 1.08)):
        tuner = Tuner(costs.times(), 4, STATED)
        for _ in range(3):
            replay(costs, tuner, text(4))
        assert replay(costs, tuner, text(0, tokens)) < limit * tokens * costs.seconds(ar_plan())


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
def test_a_text_whose_drafts_all_survive(costs):
    """`auto` gains most of what the best plan could, even after a text in which none survived."""
    plain = costs.seconds(ar_plan())
    best = min(costs.seconds(verify_plan(drafts)) / (drafts + 1) for drafts in range(1, 5))
    for before in ([], [text(0)]):
        tuner = Tuner(costs.times(), 4, STATED)
        for one in before:
            replay(costs, tuner, one)
        assert plain - replay(costs, tuner, text(4)) / 128 > 0.75 * (plain - best)
