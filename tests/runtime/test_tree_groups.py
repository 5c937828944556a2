"""Expected tokens per pass of trees against simulation, and the sizes of their groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.bundle.plan import full_tree, tree_plan
from pass_runtime.bundle.tree import TREE_SIZES, tree_nodes
from pass_runtime.tuning.group_sizes import cumulative_of, fused_tokens
from pass_runtime.tuning.tree_groups import (
    AFTER_LATER,
    LATER_CHOICES,
    best_tree,
    draft_probabilities,
    last_rows,
    tree_groups,
    tree_tokens,
)

RATES = st.lists(st.floats(0.0, 0.95), min_size=4, max_size=4)
SIZES = st.sampled_from(TREE_SIZES)


def simulate(groups: tuple[int, ...], rates: list[float], passes: int = 40_000) -> float:
    """Tokens per pass, played pass by pass: in each row the first, second, ... choice or none of them is right."""
    rng, nodes = np.random.default_rng(0), list(tree_nodes(len(groups) - 1, 4))
    left, tokens = 0, 0
    for draws in rng.random((passes, 4)):
        path: tuple[int, ...] = ()
        usual = 1.0
        while len(path) < left:
            first = usual * rates[len(path)]
            ends = np.cumsum([first, *(share * (1 - first) for share in LATER_CHOICES)])
            rank = int(np.searchsorted(ends, draws[len(path)], side="right"))
            if (*path, rank) not in nodes:
                break
            path, usual = (*path, rank), usual * (1.0 if rank == 0 else AFTER_LATER)
        tokens += 1 + len(path)
        left = groups[nodes.index(path) + 1 if path else 0]
    return tokens / passes


@pytest.mark.parametrize("rates", [[0.6, 0.5, 0.4, 0.4], [0.3, 0.7, 0.5, 0.2]], ids=str)
@pytest.mark.parametrize(
    "groups", [(2, 2, 2, 2), (2, 1, 0, 1), (3, 3, 2, 1, 0, 2), (4,) * 9, (4, 3, 2, 1, 0, 1, 0, 2, 0)]
)
def test_against_simulation(groups, rates):
    plan = tree_plan(groups, 4)
    probabilities = draft_probabilities(plan.drafts, 4, rates)
    found = float(tree_tokens(plan, np.array([groups]), probabilities)[0])
    assert found == pytest.approx(simulate(groups, rates), rel=0.01)


@settings(derandomize=True, deadline=None)
@given(rates=RATES, drafts=SIZES)
def test_the_last_row_has_a_distribution(rates, drafts):
    plan = full_tree(drafts, 4)
    last = last_rows(plan, draft_probabilities(drafts, 4, rates))
    assert last.min() >= 0
    np.testing.assert_allclose(last.sum(1), 1)
    assert last[0, 0] == 1


@settings(derandomize=True, deadline=None)
@given(rates=RATES, drafts=SIZES)
def test_groups_grow_by_one_row_up_to_full_ones(rates, drafts):
    plan = full_tree(drafts, 4)
    groups = tree_groups(plan, draft_probabilities(drafts, 4, rates))
    assert groups.sum(1).tolist() == list(range(1, sum(plan.groups) + 1))
    assert (np.diff(groups, axis=0) >= 0).all()
    assert tuple(groups[-1]) == plan.groups
    for each in groups:
        tree_plan(each.tolist(), 4)  # which refuses what no plan can have


@settings(derandomize=True, deadline=None)
@given(rates=RATES)
def test_a_tree_writes_more_than_its_chain(rates):
    chain = float(fused_tokens(np.array([[4] * 5]), cumulative_of(rates))[0])
    plan = full_tree(8, 4)
    assert tree_tokens(plan, np.array([plan.groups]), draft_probabilities(8, 4, rates))[0] >= chain - 1e-9


def test_the_best_tree_depends_on_what_rows_cost():
    rates = [0.6, 0.5, 0.45, 0.4]
    free = best_tree(TREE_SIZES, 4, rates, lambda _width, _drafts: 1.0, 85)
    costly = best_tree(TREE_SIZES, 4, rates, lambda width, _drafts: 1 + 0.05 * width, 85)
    assert len(free.groups) == 17 and len(costly.groups) == 4
    assert best_tree((8, 16), 4, rates, lambda _width, _drafts: 1.0, 45, full=True).groups == (4,) * 9
    assert best_tree(TREE_SIZES, 4, rates, lambda _width, _drafts: 1.0, 4) is None
    assert best_tree(TREE_SIZES, 4, rates, lambda _width, _drafts: 1.0, 85, rate=3.5) is None
