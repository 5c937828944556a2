"""The noise offsets that the tails read: for each slot, a row that lists every position of the longest text.

Only a part of a slot's row is ever filled: from where its text is now to AHEAD positions beyond its next pass, and more
when a pass may look beyond that. So the cost of starting a request does not grow with the KV capacity.
"""

from __future__ import annotations

import numpy as np

from pass_runtime.backends.buffers import Buffers
from pass_runtime.bundle.noise import STREAMS, noise_offsets
from pass_runtime.bundle.sampling import Rule

AHEAD = 256
"""How many positions are filled beyond those of the next pass."""


class NoiseRows:
    """Fills the rows of `slots` slots. `positions` is N, how many positions a row lists."""

    def __init__(self, buffers: Buffers, rule: Rule, slots: int, positions: int) -> None:
        self._buffers, self._positions = buffers, positions
        self._streams = STREAMS if rule == "rejection" else STREAMS[:1]
        self._seeds: list[int | None] = [None] * slots
        self._filled = [range(0)] * slots

    def begin(self, slot: int, seed: int | None) -> None:
        """Start another text in `slot` with this seed, or with None where it is decoded greedily and needs no noise."""
        self._seeds[slot], self._filled[slot] = seed, range(0)

    def cover(self, slot: int, first: int, stop: int) -> None:
        """Make sure that the row of `slot` holds the positions from `first` up to, but not including, `stop`."""
        seed, filled = self._seeds[slot], self._filled[slot]
        stop = min(stop, self._positions)
        if seed is None or (filled.start <= first and stop <= filled.stop):
            return
        self._filled[slot] = range(0)  # Nothing counts as filled until all of it is written.
        wanted = range(first, min(stop + AHEAD, self._positions))
        positions = np.arange(wanted.start, wanted.stop, dtype=np.int64)
        for stream in self._streams:
            offsets = noise_offsets(seed, positions, stream)
            self._buffers.write_part(stream, slot, (self._positions, 2), wanted.start, offsets)
        self._filled[slot] = wanted
