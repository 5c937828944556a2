"""How engines differ, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.bundle.plan import MAX_LOOKAHEAD, MODES, Plan, make_cycle, verify_plan

DEFAULT_BATCH = 8
"""Sequences at a time, where neither a user nor engines say how many."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do.

    capacities: KV capacities S in rising order; the cache is as long as its longest sequence needs.
    prefill_widths: chunk widths Q in falling order, ending in 1.
    batch_sizes: slots that a pass may run over, in rising order; the last is how many there are.
    least_width: narrower windows are padded to it.
    listed: N, the positions that tails are told the noise of (0: as many as the largest capacity may want).
    lookahead: the only number of drafts that plans may have, with full groups; None allows any plan.
    """

    device: str
    vocab_size: int
    capacities: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    batch_sizes: tuple[int, ...] = (1,)
    lookahead: int | None = None
    least_width: int = 1
    listed: int = 0

    @property
    def slots(self) -> int:
        return self.batch_sizes[-1]

    @property
    def max_capacity(self) -> int:
        return self.capacities[-1]

    @property
    def positions(self) -> int:
        """N, the positions a tail may want noise for."""
        return self.listed or listed_positions(self.max_capacity)

    def batch_size(self, slots: int) -> int:
        """The smallest batch that covers the first `slots` slots."""
        return next(size for size in self.batch_sizes if size >= slots)

    def capacity(self, columns: int) -> int:
        """The smallest capacity of at least `columns`."""
        return next(size for size in self.capacities if size >= columns)

    def columns(self, width: int) -> int:
        """Cache columns that a window of `width` rows writes."""
        return max(width, self.least_width)

    def allows(self, plans: Sequence[Plan]) -> bool:
        """Whether there are engines for all of `plans`."""
        if self.lookahead is None:
            return True
        return set(plans) <= {plan for mode in MODES for plan in make_cycle(mode, self.lookahead).plans}

    def verify_plan(self, drafts: int) -> Plan:
        """The plan that verifies `drafts` drafts; it may have room for more."""
        return verify_plan(drafts if self.lookahead is None else self.lookahead)


def listed_positions(capacity: int) -> int:
    """N for a cache of `capacity` columns: a window's last row predicts one past it, and a fused tail looks as far as a
    full group would."""
    return capacity + 1 + MAX_LOOKAHEAD


def batch_sizes(maximum: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to and including `maximum`."""
    sizes, size = [], 1
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)
