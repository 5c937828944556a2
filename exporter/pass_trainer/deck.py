"""Deals the sequences of an epoch in a random order, which newly written sequences join."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Deck:
    """Deals the indices 0..n-1: each once an epoch. Seed and `joins` decide the order.

    joins: [number of indices dealt before, n from then on] of every growth.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.joins: list[list[int]] = []
        self._order = np.zeros(0, np.int64)
        self._next = self._dealt = self._epoch = self._unused = 0

    def __len__(self) -> int:
        return self.joins[-1][1] if self.joins else 0

    @property
    def was_dealt(self) -> bool:
        """Whether every index was dealt at least once since the last growth."""
        return self._dealt - self.joins[-1][0] >= self._unused

    def grow(self, size: int) -> None:
        """Let the indices up to `size` join the rest of the running epoch."""
        if size <= len(self):
            return
        rest, new = self._order[self._next :], np.arange(len(self), size)
        random = np.random.default_rng(
            (self._seed, self._epoch, len(self)) if len(self) else (self._seed, 0)
        )
        self._order, self._next = random.permutation(np.concatenate([rest, new])), 0
        self._unused = len(self._order)
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
        """Bring a new deck to the place where an earlier one had dealt `dealt` indices."""
        for before, size in joins:
            self.deal(before - self._dealt)
            self.grow(size)
        self.deal(dealt - self._dealt)
