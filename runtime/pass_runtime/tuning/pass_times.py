"""What a pass costs: the trunk by batch and window width, the tail by rows, measured on the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

REPEATS = 3
WIDEST = 64
"""Windows with more rows, of all slots together, are not measured: they pay nowhere that we know of."""

Points = dict[int, float]
"""Seconds by rows."""
Timer = Callable[[Plan], tuple[float, float]]
"""Seconds of trunk and tail in one pass over a plan."""


@dataclass(frozen=True)
class PassTimes:
    """Medians in seconds: `trunk` by window width, `tail` by sampled rows, of a pass over one slot; linear between, and
    beyond, them. `batched`: the trunk by width for other batch sizes, where they were measured."""

    trunk: Points
    tail: Points
    batched: dict[int, Points] = field(default_factory=dict)

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
    """Plans that together show widths from 1 to the widest a bundle with `lookahead` rows has."""
    lengths = sorted({length for length in (1, 2, 4, lookahead) if length <= lookahead})
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    plans = [ar_plan(), *(verify_plan(length) for length in lengths), draft_plan(lookahead), *fused[1::2], *fused[-1:]]
    return [plan for plan in dict.fromkeys(plans) if plan.width * batch <= WIDEST or plan.width == 1]


def measure(time: Timer, plans: Sequence[Plan], repeats: int = REPEATS) -> tuple[Points, Points]:
    """Time passes over `plans` in alternation: medians of the trunk by width, and of the tail by sampled rows."""
    trunk: dict[int, list[float]] = {}
    tail: dict[int, list[float]] = {}
    for number in range(repeats + 1):
        for plan in plans:
            seconds = time(plan)
            if number:  # the first round warms up
                trunk.setdefault(plan.width, []).append(seconds[0])
                tail.setdefault(plan.sampled_rows, []).append(seconds[1])
    first, second = ({size: statistics.median(times) for size, times in kind.items()} for kind in (trunk, tail))
    return first, second
