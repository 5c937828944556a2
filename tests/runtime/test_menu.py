"""The menu of `auto`; expected tokens per pass, compared with a simulation and with all shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from best_shapes import best_shape, fused_tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import Plan, ar_plan, fused_cycle, make_cycle, tree_cycle
from pass_runtime.bundle.tree import TREE_SIZES, tree_nodes
from pass_runtime.tuning.estimates import cumulative_acceptance
from pass_runtime.tuning.tuner import AFTER_LATER_RATIO, LATER_CHOICE_SHARES, expected_tokens, menu

RATES = st.lists(st.floats(0.0, 0.95), min_size=1, max_size=8)
WITH_TREES = Capabilities("test", 100, (4096,), (64, 1), trees=TREE_SIZES)


def simulate(plan: Plan, rates: list[float], passes: int = 40_000) -> float:
    """Return the tokens per pass of `passes` passes, each of which accepts drafts at random.

    A draft is named by its path: which choice (0 is the first) each draft from the root to it is.
    """
    nodes = (
        list(tree_nodes(plan.drafts, plan.depth))
        if plan.parents
        else [(0,) * n for n in range(1, plan.drafts + 1)]
    )
    drafted_depth, tokens = 0, 0
    for draws in np.random.default_rng(0).random((passes, len(rates))):
        path: tuple[int, ...] = ()
        rate_factor = 1.0  # first choices are accepted less often after later ones
        while len(path) < drafted_depth:
            first = rate_factor * rates[len(path)]
            ends = np.cumsum([first, *(share * (1 - first) for share in LATER_CHOICE_SHARES)])
            choice = int(np.searchsorted(ends, draws[len(path)], side="right"))
            if (*path, choice) not in nodes:
                break
            path = (*path, choice)
            rate_factor *= 1.0 if choice == 0 else AFTER_LATER_RATIO
        tokens += 1 + len(path)
        drafted_depth = plan.groups[nodes.index(path) + 1 if path else 0]
    return tokens / passes


CHAIN_GROUPS = [(3, 3, 3, 3), (3, 1, 2, 0), (2, 0, 1), (1, 0)]
TREE_GROUPS = [
    (2, 2, 2, 2),
    (2, 1, 0, 1),
    (3, 3, 2, 1, 0, 2),
    (4,) * 9,
    (4, 3, 2, 1, 0, 1, 0, 2, 0),
]


@pytest.mark.parametrize("rates", [[0.6, 0.5, 0.4, 0.4], [0.3, 0.7, 0.5, 0.2]], ids=str)
@pytest.mark.parametrize(
    "cycle",
    [*map(fused_cycle, CHAIN_GROUPS), *(tree_cycle(groups, 4) for groups in TREE_GROUPS)],
    ids=lambda cycle: cycle.name,
)
def test_expected_tokens_are_those_of_a_simulation(cycle, rates):
    expected = expected_tokens(cycle, cumulative_acceptance(rates))
    assert expected == pytest.approx(simulate(cycle.plans[0], rates[: cycle.depth]), rel=0.01)


def test_expected_tokens_by_hand():
    halves = cumulative_acceptance([0.5, 0.5, 0.9])
    assert expected_tokens(make_cycle("ar", 0), halves) == 1
    assert expected_tokens(make_cycle("two-pass", 2), halves) == pytest.approx(1 + (0.5 + 0.25) / 2)
    assert expected_tokens(make_cycle("fused", 2), halves) == pytest.approx(1 + 0.5 + 0.25)
    # A pass has a draft unless the pass before accepted one, and accepts it half of the time:
    # x = (1 - x) / 2, so that x = 1/3 of the passes accept a draft.
    assert expected_tokens(fused_cycle((1, 0)), halves) == pytest.approx(1 + 1 / 3)


def test_expected_tokens_of_certain_drafts():
    """If every draft is accepted, windows of two sizes alternate for ever: the mean is expected."""
    certain = cumulative_acceptance([1.0] * 4)
    assert expected_tokens(make_cycle("fused", 2), certain) == pytest.approx(3)
    assert expected_tokens(fused_cycle((1, 0)), certain) == pytest.approx(1.5)
    assert expected_tokens(tree_cycle((4,) * 9, 4), certain) == pytest.approx(5)


def test_expected_tokens_of_the_menu_are_those_of_the_cpp_runtime():
    """runtime/cpp/tests/parts_test.cpp expects the same of the same cycles, in the same order."""
    expected = {
        **{"ar": 1, "two-pass 1": 1.35, "two-pass 2": 1.575, "two-pass 3": 1.665},
        **{"two-pass 4": 1.692, "fused-1": 1.7, "fused:2,1,1": 1.835, "fused-2": 2.15},
        **{"fused:3,2,1,1": 2.0643448276, "fused-3": 2.33, "fused:4,3,2,1,1": 2.2254491839},
        **{"fused-4": 2.384, "fused:2,2,1": 2.0103448276, "tree:2,1,1,1": 1.8845, "tree-3": 2.24},
        **{"tree:3,2,1,1,1,1": 2.1410786885, "tree-5": 2.495},
        **{"tree:4,3,2,1,1,1,1,1,1": 2.3391000213, "tree-8": 2.6283928571},
    }
    computed = {}
    for cycle in menu(4, replace(WITH_TREES, trees=(3, 5, 8))):
        name = f"two-pass {cycle.depth}" if len(cycle.plans) == 2 else cycle.plans[0].name
        computed[name] = expected_tokens(cycle, np.array([1, 0.7, 0.45, 0.18, 0.054]))
    assert list(computed) == list(expected) and computed == pytest.approx(expected)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(rates=RATES)
def test_expected_tokens_are_those_of_the_stationary_distribution(rates):
    """`expected_tokens` iterates the Markov chain of windows; `fused_tokens` solves equations."""
    cumulative = cumulative_acceptance(rates)
    for cycle in menu(len(rates)):
        tokens = expected_tokens(cycle, cumulative)
        assert 1 <= tokens <= 1 + cumulative[1 : cycle.depth + 1].sum() + 1e-9
        if cycle.plans[0].is_fused:
            stationary = fused_tokens(np.array([cycle.plans[0].groups]), cumulative)
            assert tokens == pytest.approx(stationary[0])


@settings(derandomize=True, deadline=None)
@given(rates=st.lists(st.floats(0.0, 0.95), min_size=4, max_size=4))
def test_a_tree_writes_no_less_than_the_chain_of_its_first_choices(rates):
    cumulative = cumulative_acceptance(rates)
    tree, chain = (expected_tokens(make_cycle(mode, 4), cumulative) for mode in ("tree-8", "fused"))
    assert tree >= chain - 1e-9


@settings(derandomize=True, deadline=None, max_examples=60)
@given(rates=st.lists(st.floats(0.05, 0.95), min_size=4, max_size=4), row=st.floats(0.0, 0.3))
def test_the_best_of_the_menu_is_nearly_the_best_of_all_shapes(rates, row):
    """In tokens per second, if a pass takes 1 s and `row` s for each of its rows."""
    cumulative = cumulative_acceptance(rates)
    best, _ = best_shape(cumulative, lambda width, _drafts: 1 + row * width)
    speeds = []
    for cycle in menu(4):
        seconds = sum(1 + row * plan.width for plan in cycle.plans) / len(cycle.plans)
        speeds.append(expected_tokens(cycle, cumulative) / seconds)
    assert max(speeds) > 0.88 * best


@pytest.mark.parametrize("lookahead", range(17))
def test_the_menu_is_short_and_has_every_kind_of_cycle(lookahead):
    cycles = menu(lookahead, WITH_TREES)
    assert cycles[0].plans == (ar_plan(),)
    assert len(cycles) == len(set(cycles)) <= 27 and len(menu(lookahead)) <= 19
    assert {len(cycle.plans) for cycle in cycles} == ({1, 2} if lookahead else {1})
    assert all(cycle.depth <= lookahead for cycle in cycles)
    for mode in ("two-pass", "fused"):
        assert make_cycle(mode, lookahead) in cycles
    tree_sizes = {len(cycle.plans[0].parents) for cycle in cycles}
    assert tree_sizes >= {size for size in (3, 5, 8) if lookahead >= 4}
    rounding = menu(lookahead, replace(WITH_TREES, rounds_activations=True))
    assert not any(cycle.is_tree for cycle in (*menu(lookahead), *rounding))


@pytest.mark.parametrize("built", [1, 2, 5, 7])
def test_the_menu_of_engines_has_only_the_plans_that_were_built(built):
    """Engines are built for one look-ahead and full groups."""
    engines = replace(WITH_TREES, fixed_lookahead=built, trees=(3,) if built > 1 else ())
    modes = ("ar", "two-pass", "fused", *(["tree-3"] if built > 1 else []))
    for lookahead in (built, 8):
        assert set(menu(lookahead, engines)) == {make_cycle(mode, built) for mode in modes}
    assert [cycle.name for cycle in menu(built - 1, engines) if not cycle.is_tree] == ["ar"]
