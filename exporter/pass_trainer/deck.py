"""Chooses the sequences of each training step: all in a random order in every epoch, new ones
included as soon as they are written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Deck:
    """Deals the indices 0..n-1 of n sequences in a random order, each once in an epoch.

    The order depends on the seed and `joins` alone.
    joins: for every growth of the deck, how many indices were dealt before it, and n after it.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.joins: list[list[int]] = []
        self._order = np.zeros(0, np.int64)
        self._next = self._dealt = self._epoch = self._undealt_at_growth = 0

    def __len__(self) -> int:
        return self.joins[-1][1] if self.joins else 0

    @property
    def was_dealt(self) -> bool:
        """Whether the epoch of the last growth is over, so that every index was dealt."""
        return self._dealt - self.joins[-1][0] >= self._undealt_at_growth

    def grow(self, size: int) -> None:
        """Let the new indices below `size` join the rest of the running epoch."""
        if size <= len(self):
            return
        rest, new = self._order[self._next :], np.arange(len(self), size)
        # The first growth begins epoch 0; `deal` gives every later epoch a seed of its own.
        seed = (self._seed, self._epoch, len(self)) if len(self) else (self._seed, 0)
        self._order = np.random.default_rng(seed).permutation(np.concatenate([rest, new]))
        self._next, self._undealt_at_growth = 0, len(self._order)
        self.joins.append([self._dealt, size])

    def deal(self, count: int) -> list[int]:
        """Return the next `count` indices."""
        dealt: list[int] = []
        while len(dealt) < count:
            if self._next == len(self._order):
                self._epoch += 1
                self._order = np.random.default_rng((self._seed, self._epoch)).permutation(
                    len(self)
                )
                self._next = 0
            part = self._order[self._next : self._next + count - len(dealt)]
            dealt += part.tolist()
            self._next += len(part)
        self._dealt += count
        return dealt

    def replay(self, joins: Sequence[Sequence[int]], dealt: int) -> None:
        """Bring a new deck to the state of one that had these `joins` and dealt `dealt` indices."""
        for before, size in joins:
            self.deal(before - self._dealt)
            self.grow(size)
        self.deal(dealt - self._dealt)
