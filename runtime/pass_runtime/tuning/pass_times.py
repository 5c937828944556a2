"""What a pass costs: the trunk by batch and window width, the tail by rows, measured on the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

AGREE = 1.1
"""Two times of a pass that differ by less are enough."""
REPEATS, WIDE_REPEATS, WIDE = 4, 2, 8
"""Times of a pass at most, and of one over more than WIDE rows: those take longest, and matter least."""
WIDEST = 64
"""Windows with more rows, of all slots together, are not measured: they pay nowhere that we know of."""

Points = dict[int, float]
"""Seconds by rows."""
Timer = Callable[[Plan], tuple[float, float]]
"""Seconds of trunk and tail in one pass over a plan."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds: `trunk` by window width, `tail` by sampled rows, of a pass over one slot; linear between, and
    beyond, them. `batched`: the trunk by width for other batch sizes, where they were measured."""

    trunk: Points
    tail: Points
    batched: dict[int, Points] = field(default_factory=dict)

    def with_tail(self, trunk: Points, tail: Points) -> PassTimes:
        """For another tail, whose passes were timed at fewer widths: the trunk as it was, times what it takes longer
        there now."""
        slower = statistics.mean(seconds / self.trunk[width] for width, seconds in trunk.items())
        return PassTimes({width: slower * seconds for width, seconds in self.trunk.items()}, tail)

    @property
    def max_width(self) -> int:
        return max(self.trunk)

    def seconds(self, width: int, sampled_rows: int, batch: int = 1) -> float:
        """Of one pass. A batch that nobody measured is taken for a window of as many rows."""
        points = self.batched.get(batch)
        trunk = between(self.trunk, batch * width) if points is None else between(points, width)
        return trunk + between(self.tail, batch * sampled_rows)

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        return self.seconds(plan.width, plan.sampled_rows, batch)


def between(points: Points, at: int) -> float:
    """Linear between the points, and behind the last one as from the first to it."""
    x = sorted(points)
    y = [points[i] for i in x]
    if at > x[-1] > x[0]:
        return y[-1] + (at - x[-1]) * (y[-1] - y[0]) / (x[-1] - x[0])
    return float(np.interp(at, x, y))


def probe_plans(lookahead: int, batch: int = 1) -> list[Plan]:
    """Plans that together show widths from 1 to the widest a bundle with `lookahead` rows has: few of them, since pass
    times are nearly linear in between."""
    lengths = sorted({length for length in (1, 4, lookahead) if length <= lookahead})
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    fused = [plan for plan in fused if plan.width * batch <= WIDEST]
    chains = [ar_plan(), *(verify_plan(length) for length in lengths), draft_plan(lookahead)]
    narrow = [plan for plan in chains if plan.width * batch <= WIDEST or plan.width == 1]
    return list(dict.fromkeys([*narrow, *fused[(len(fused) - 1) // 2 :][:1], *fused[-1:]]))


def measure(time: Timer, plans: Sequence[Plan]) -> tuple[Points, Points]:
    """Time passes over `plans` in alternation: the trunk by width, and the tail by sampled rows.

    Of each plan it is the least, since whatever disturbs a pass, as being the first, only makes it slower. A plan whose
    two least times agree is not timed again.
    """
    seconds: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(REPEATS):
        for plan in plans:
            if number < (WIDE_REPEATS if plan.width > WIDE else REPEATS) and not _agree(seconds[plan]):
                seconds[plan].append(time(plan))
    trunk: dict[int, list[float]] = {}
    tail: dict[int, list[float]] = {}
    for plan, passes in seconds.items():
        trunk.setdefault(plan.width, []).append(min(each[0] for each in passes))
        tail.setdefault(plan.sampled_rows, []).append(min(each[1] for each in passes))
    first, second = ({size: statistics.mean(times) for size, times in kind.items()} for kind in (trunk, tail))
    return first, second


def _agree(passes: Sequence[tuple[float, float]]) -> bool:
    """Whether the two least times of a pass, of trunk and tail together, are nearly alike."""
    least = sorted(trunk + tail for trunk, tail in passes)[:2]
    return len(least) == 2 and least[1] <= AGREE * least[0]
