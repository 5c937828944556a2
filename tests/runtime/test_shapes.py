"""Expected tokens per pass against simulation, and the best group sizes against every possible choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pass_runtime.tuning.group_sizes import (
    best_shape,
    count_probabilities,
    cumulative_of,
    fused_tokens,
    shapes,
    two_pass_tokens,
)

RATES = st.lists(st.floats(0.0, 0.95), min_size=1, max_size=4)


def simulate(groups: tuple[int, ...], rates: list[float], passes: int = 60_000) -> float:
    """Tokens per pass, played pass by pass."""
    rng = np.random.default_rng(0)
    draws = rng.random((passes, len(rates)))
    left, tokens = 0, 0
    for draw in draws:
        accepted = 0
        while accepted < left and draw[accepted] < rates[accepted]:
            accepted += 1
        tokens += 1 + accepted
        left = groups[accepted]
    return tokens / passes


@pytest.mark.parametrize(
    ("groups", "rates"),
    [((3, 3, 3, 3), [0.7, 0.5, 0.3]), ((3, 1, 2, 0), [0.6, 0.6, 0.6]), ((2, 0, 1), [0.9, 0.2]), ((1, 0), [0.5])],
)
def test_against_simulation(groups, rates):
    found = float(fused_tokens(np.array([groups]), cumulative_of(rates))[0])
    assert found == pytest.approx(simulate(groups, rates), rel=0.01)


def test_by_hand():
    assert fused_tokens(np.array([[2, 2, 2]]), cumulative_of([0.5, 0.5]))[0] == pytest.approx(1 + 0.5 + 0.25)
    # One draft after nothing accepted, none after one: half the passes that have a draft accept it. From "none
    # accepted" the next is "accepted" with 1/2, from "accepted" never: a third of the passes accept one.
    assert fused_tokens(np.array([[1, 0]]), cumulative_of([0.5]))[0] == pytest.approx(1 + 1 / 3)
    assert two_pass_tokens(2, cumulative_of([0.5, 0.5, 0.9])) == pytest.approx(1 + (0.5 + 0.25) / 2)


@settings(derandomize=True, deadline=None)
@given(rates=RATES, drafts=st.integers(0, 4))
def test_accepted_is_a_distribution(rates, drafts):
    cumulative = cumulative_of(rates)
    accepted = count_probabilities(drafts, cumulative)
    assert accepted.min() >= 0 and accepted.sum() == pytest.approx(1)
    assert not accepted[drafts + 1 :].any()
    assert accepted @ np.arange(len(cumulative)) == pytest.approx(cumulative[1 : drafts + 1].sum())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(rates=RATES.filter(lambda rates: len(rates) <= 3), base=st.floats(0.5, 30), row=st.floats(0.01, 2))
def test_no_choice_of_groups_is_better(rates, base, row):
    """All of them, rising ones too, up to three drafts: what is left out by `shapes` is never worth more."""
    cumulative = cumulative_of(rates)

    def seconds(width: int, drafts: int) -> float:
        return base + row * width

    best = best_shape(cumulative, seconds, 100)
    assert best is not None
    for drafts in range(1, len(rates) + 1):
        every = np.array([g for g in itertools.product(range(drafts + 1), repeat=drafts + 1) if g[0]])
        rate = fused_tokens(every, cumulative) / (base + row * (1 + drafts + every.sum(1)))
        assert rate.max() <= best.rate * (1 + 1e-9), every[rate.argmax()]


def test_free_rows_are_all_taken_and_dear_ones_are_not():
    cumulative = cumulative_of([0.7, 0.6, 0.5, 0.4])
    free = best_shape(cumulative, lambda _width, _drafts: 1.0, 100)
    assert free is not None and free.groups == (4,) * 5
    dear = best_shape(cumulative, lambda width, _drafts: float(width), 100)
    assert dear is not None and dear.groups == (1, 0)
    assert dear.rate < 1  # plain decoding: one token for one row


@pytest.mark.parametrize("width", [2, 3, 6, 20])
def test_the_width_is_a_limit(width):
    best = best_shape(cumulative_of([0.9] * 4), lambda _width, _drafts: 1.0, width)
    assert (best is None) == (width == 2)
    assert best is None or len(best.groups) + sum(best.groups) <= width


def test_certain_drafts():
    best = best_shape(cumulative_of([1.0, 1.0]), lambda _width, _drafts: 1.0, 100)
    assert best is not None and best.groups == (2, 2, 2) and best.tokens == pytest.approx(3, abs=0.01)


def test_every_choice_is_listed_once():
    listed = [tuple(groups) for groups in shapes(3).tolist()]
    assert len(listed) == len(set(listed)) == 3 * 4**3
    many = [tuple(groups) for groups in shapes(4).tolist()]
    assert len(many) == len(set(many))
    falling = [groups for groups in many if list(groups) == sorted(groups, reverse=True)]
    assert len(falling) == 70  # C(8, 4)
    assert all(groups[-1] == 4 and (*groups[:-1], 0) in falling for groups in set(many) - set(falling))
