"""The order in which training takes sequences: `Deck` deals each once an epoch, new sequences join,
and a resumed run continues the order."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pass_trainer.deck import Deck

DEALS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 20)), max_size=8)
"""Pairs: by how many sequences the deck grows, and how many it then deals."""


@given(st.integers(1, 12), DEALS)
def test_sequences_are_dealt_equally_often_even_if_others_join(
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
    # So many deals contain a whole epoch, and so every sequence.
    assert len({*deck.deal(2 * len(deck))}) == len(deck)


@given(st.integers(1, 12), DEALS, st.integers(0, 50))
def test_a_replayed_deck_deals_the_same_sequences(
    first: int, deals: list[tuple[int, int]], next_count: int
):
    deck, replayed = Deck(7), Deck(7)
    deck.grow(first)
    for growth, count in deals:
        deck.grow(len(deck) + growth)
        deck.deal(count)
    replayed.replay(deck.joins, sum(count for _, count in deals))
    assert replayed.joins == deck.joins
    for each in (deck, replayed):
        each.grow(len(each) + 4)
    assert deck.deal(next_count) == replayed.deal(next_count)


def test_the_order_of_a_deck_that_does_not_grow_depends_on_seed_and_epoch_alone():
    """So runs resume in the same order from checkpoints that are older than the growth of decks."""
    deck = Deck(5)
    deck.grow(10)
    epochs = [np.random.default_rng((5, epoch)).permutation(10) for epoch in range(3)]
    assert deck.deal(4) + deck.deal(26) == np.concatenate(epochs).tolist()


def test_was_dealt_is_true_once_every_sequence_was_dealt():
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
