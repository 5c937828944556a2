"""The order of sequences: each once an epoch, new ones join, and a resumed run goes on where it
was."""

from __future__ import annotations

import functools
import operator
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pass_trainer.deck import Deck

DEALS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=8)
"""(growth, sequences dealt then) in turn."""


def deal(deck: Deck, deals: list[tuple[int, int]]) -> list[int]:
    dealt = []
    for growth, count in deals:
        deck.grow(len(deck) + growth)
        dealt += deck.deal(count)
    return dealt


@given(st.integers(1, 12), DEALS)
def test_new_ones_join_the_epoch(first: int, deals: list[tuple[int, int]]):
    """Nothing is dealt a second time before everything was dealt that had joined by then."""
    deck, times = Deck(3), Counter[int]()
    deck.grow(first)
    for growth, count in deals:
        deck.grow(len(deck) + growth)
        for index in deck.deal(count):
            assert 0 <= index < len(deck)
            times[index] += 1
            joined_first = [times[i] for i in range(first)]
            assert max(joined_first) - min(joined_first) <= 1
    assert len({*deck.deal(2 * len(deck))}) == len(deck)


@given(st.integers(1, 12), DEALS, st.integers(0, 50))
def test_a_replayed_deck_goes_on_the_same(first: int, deals: list[tuple[int, int]], more: int):
    deck, again = Deck(7), Deck(7)
    deck.grow(first)
    dealt = len(deal(deck, deals))
    again.replay(deck.joins, dealt)
    assert again.joins == deck.joins
    for each in (deck, again):
        each.grow(len(each) + 4)
    assert deck.deal(more) == again.deal(more)


def test_without_growth_an_epoch_is_a_permutation_of_seed_and_epoch():
    """So it was before text could join: runs of the same seed keep their order."""
    deck = Deck(5)
    deck.grow(10)
    orders = [np.random.default_rng((5, epoch)).permutation(10).tolist() for epoch in range(3)]
    assert deck.deal(4) + deck.deal(26) == functools.reduce(operator.iadd, orders, [])


def test_a_deck_was_dealt_once_everything_was_used():
    deck = Deck(0)
    deck.grow(6)
    deck.deal(5)
    assert not deck.was_dealt
    deck.deal(1)
    assert deck.was_dealt
    deck.grow(8)
    deck.deal(1)
    assert not deck.was_dealt
    deck.deal(1)
    assert deck.was_dealt
