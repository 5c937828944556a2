"""What a pass costs: the trunk by window width, the tail by sampled rows, measured on the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan
from pass_runtime.bundle.sampling import SamplingParams

REPEATS = 3
WIDEST = 64
"""Windows beyond this are not measured: they pay nowhere that we know of."""


@dataclass(frozen=True)
class PassTimes:
    """Medians in seconds: `trunk` by window width, `tail` by sampled rows; linear between, and beyond, them."""

    trunk: dict[int, float]
    tail: dict[int, float]

    @property
    def max_width(self) -> int:
        return max(self.trunk)

    def seconds(self, width: int, sampled_rows: int) -> float:
        """Of one pass."""
        return _between(self.trunk, width) + _between(self.tail, sampled_rows)

    def plan_seconds(self, plan: Plan) -> float:
        return self.seconds(plan.width, plan.sampled_rows)


def _between(points: dict[int, float], at: int) -> float:
    x = sorted(points)
    y = [points[i] for i in x]
    if at > x[-1] > x[0]:
        return y[-1] + (at - x[-1]) * (y[-1] - y[0]) / (x[-1] - x[0])
    return float(np.interp(at, x, y))


def probe_plans(lookahead: int) -> list[Plan]:
    """Plans that together show widths from 1 to the widest a bundle with `lookahead` rows has."""
    lengths = sorted({length for length in (1, 2, 4, lookahead) if length <= lookahead})
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    plans = [ar_plan(), *(verify_plan(length) for length in lengths), draft_plan(lookahead), *fused[1::2], *fused[-1:]]
    return [plan for plan in dict.fromkeys(plans) if plan.width <= WIDEST]


def measure(backend: Backend, params: SamplingParams, plans: Sequence[Plan], repeats: int = REPEATS) -> PassTimes:
    """Time passes over `plans` behind one token, in alternation. Ends whatever request the backend was busy with."""
    owner = object()
    backend.begin(owner, params)
    trunk: dict[int, list[float]] = {}
    tail: dict[int, list[float]] = {}
    for number in range(repeats + 1):
        for plan in plans:
            seconds = backend.time(plan)
            if number:  # the first round warms up
                trunk.setdefault(plan.width, []).append(seconds[0])
                tail.setdefault(plan.sampled_rows, []).append(seconds[1])
    return PassTimes(*({size: statistics.median(times) for size, times in kind.items()} for kind in (trunk, tail)))
