from __future__ import annotations

import numpy as np
import pytest
from best_shapes import best_shape, fused_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import fused_plan, make_plan
from pass_runtime.bundle.window import ar_window
from pass_runtime.tuning.auto import Acceptance, expected_tokens, plans_up_to

RATES = st.lists(st.floats(0.0, 0.95), min_size=1, max_size=8)


def test_expected_tokens_by_hand():
    halves = Acceptance([0.5, 0.5, 0.9]).cumulative
    assert expected_tokens(make_plan("ar", 0), halves) == 1
    assert expected_tokens(make_plan("two-pass", 2), halves) == pytest.approx(1 + (0.5 + 0.25) / 2)
    assert expected_tokens(make_plan("fused", 2), halves) == pytest.approx(1 + 0.5 + 0.25)
    # A pass has a draft unless the pass before accepted one, and accepts it half of the time:
    # x = (1 - x) / 2, so that x = 1/3 of the passes accept a draft.
    assert expected_tokens(fused_plan((1, 0)), halves) == pytest.approx(1 + 1 / 3)
    # If every draft is accepted, windows of two sizes alternate for ever.
    certain = Acceptance([1.0] * 4).cumulative
    assert expected_tokens(make_plan("fused", 2), certain) == pytest.approx(3)
    assert expected_tokens(fused_plan((1, 0)), certain) == pytest.approx(1.5)


def test_a_pass_without_drafts_changes_no_rate():
    rates = Acceptance([0.6, 0.4])
    rates.record(0, 0)
    assert rates.rates == [0.6, 0.4]


def test_expected_tokens_are_those_of_the_cpp_runtime():
    """runtime/cpp/tests/parts_test.cpp expects the same of the same plans, in the same order."""
    expected = {
        **{"ar": 1, "two-pass 1": 1.35, "two-pass 2": 1.575, "two-pass 3": 1.665},
        **{"two-pass 4": 1.692, "fused-1": 1.7, "fused:2,1,1": 1.835, "fused-2": 2.15},
        **{"fused:3,2,1,1": 2.0643448276, "fused-3": 2.33, "fused:4,3,2,1,1": 2.2254491839},
        **{"fused-4": 2.384, "fused:2,2,1": 2.0103448276},
    }
    computed = {}
    for plan in plans_up_to(4):
        name = f"two-pass {plan.drafts}" if len(plan.windows) == 2 else plan.windows[0].name
        computed[name] = expected_tokens(plan, np.array([1, 0.7, 0.45, 0.18, 0.054]))
    assert list(computed) == list(expected) and computed == pytest.approx(expected)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rates=RATES)
def test_expected_tokens_are_those_of_the_stationary_distribution(rates):
    cumulative = Acceptance(rates).cumulative
    for plan in plans_up_to(len(rates)):
        tokens = expected_tokens(plan, cumulative)
        assert 1 <= tokens <= 1 + cumulative[1 : plan.drafts + 1].sum() + 1e-9
        if plan.windows[0].is_fused:
            stationary = fused_tokens(np.array([plan.windows[0].groups]), cumulative)
            assert tokens == pytest.approx(stationary[0])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rates=st.lists(st.floats(0.05, 0.95), min_size=4, max_size=4), row=st.floats(0.0, 0.3))
def test_the_best_plan_is_nearly_the_best_of_all_shapes(rates, row):
    cumulative = Acceptance(rates).cumulative
    best, _ = best_shape(cumulative, lambda width, _drafts: 1 + row * width)
    speeds = []
    for plan in plans_up_to(4):
        seconds = sum(1 + row * window.width for window in plan.windows) / len(plan.windows)
        speeds.append(expected_tokens(plan, cumulative) / seconds)
    assert max(speeds) > 0.88 * best


@pytest.mark.parametrize("lookahead", range(17))
def test_auto_has_few_plans_and_every_kind(lookahead):
    plans = plans_up_to(lookahead)
    assert plans[0].windows == (ar_window(),)
    assert len(plans) == len(set(plans)) <= 19
    assert {len(plan.windows) for plan in plans} == ({1, 2} if lookahead else {1})
    assert all(plan.drafts <= lookahead for plan in plans)
    for name in ("two-pass", "fused"):
        assert make_plan(name, lookahead) in plans


@pytest.mark.parametrize("built", [1, 2, 5, 7])
def test_engines_have_only_the_plans_that_were_built(built):
    engines = Capabilities("test", 100, (4096,), (64, 1), fixed_lookahead=built)
    for lookahead in (built, 8):
        plans = {make_plan(name, built) for name in ("ar", "two-pass", "fused")}
        assert set(plans_up_to(lookahead, engines)) == plans
    assert [plan.name for plan in plans_up_to(built - 1, engines)] == ["ar"]
