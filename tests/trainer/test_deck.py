"""The order of sequences: each is dealt once an epoch, new ones join, and a resumed run continues
the order."""

from __future__ import annotations

import functools
import operator
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pass_trainer.deck import Deck

DEALS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=8)
"""Pairs: by how many sequences the deck grows, and how many it then deals."""


def deal(deck: Deck, deals: list[tuple[int, int]]) -> list[int]:
    dealt = []
    for growth, count in deals:
        deck.grow(len(deck) + growth)
        dealt += deck.deal(count)
    return dealt


@given(st.integers(1, 12), DEALS)
def test_no_sequence_is_dealt_again_before_all_that_joined_were_dealt(
    first: int, deals: list[tuple[int, int]]
):
    deck, times = Deck(3), Counter[int]()
    deck.grow(first)
    for growth, count in deals:
        deck.grow(len(deck) + growth)
        for index in deck.deal(count):
            assert 0 <= index < len(deck)
            times[index] += 1
            times_of_first = [times[i] for i in range(first)]
            assert max(times_of_first) - min(times_of_first) <= 1
    assert len({*deck.deal(2 * len(deck))}) == len(deck)


@given(st.integers(1, 12), DEALS, st.integers(0, 50))
def test_a_replayed_deck_deals_the_same_sequences(
    first: int, deals: list[tuple[int, int]], more: int
):
    deck, again = Deck(7), Deck(7)
    deck.grow(first)
    dealt = len(deal(deck, deals))
    again.replay(deck.joins, dealt)
    assert again.joins == deck.joins
    for each in (deck, again):
        each.grow(len(each) + 4)
    assert deck.deal(more) == again.deal(more)


def test_the_order_of_a_deck_that_does_not_grow_depends_on_seed_and_epoch_alone():
    """So checkpoints of runs from before decks could grow keep their order."""
    deck = Deck(5)
    deck.grow(10)
    orders = [np.random.default_rng((5, epoch)).permutation(10).tolist() for epoch in range(3)]
    assert deck.deal(4) + deck.deal(26) == functools.reduce(operator.iadd, orders, [])


def test_a_deck_was_dealt_once_all_sequences_were_used():
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
