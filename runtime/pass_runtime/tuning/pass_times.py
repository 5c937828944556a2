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
    """Seconds of a pass, linear between the points and beyond them. Passes that draft have curves of their own: an
    adapter's nodes cost the same for one look-ahead row as for many, and a draft head runs once for every draft.
    Without them, such passes are taken for others of as many rows."""

    trunk: Points
    """By window width, without look-ahead rows."""
    tail: Points
    """By rows that target tokens are drawn from, where no drafts are made."""
    lookahead: Points = field(default_factory=dict)
    """The trunk by window width, with look-ahead rows."""
    drafting: Points = field(default_factory=dict)
    """The tail by drafts that it makes, behind one target token."""
    batched: dict[int, PassTimes] = field(default_factory=dict)
    """The same by rows of each slot, for the other batch sizes that were measured."""

    def with_tail(self, now: PassTimes) -> PassTimes:
        """For another tail, whose passes were timed at fewer widths: the trunk as it was, times what it takes longer
        there now."""
        slower = statistics.mean(
            seconds / known[width]
            for known, points in ((self.trunk, now.trunk), (self.lookahead, now.lookahead))
            for width, seconds in points.items()
        )
        trunk, lookahead = ({at: slower * known[at] for at in known} for known in (self.trunk, self.lookahead))
        return PassTimes(trunk, now.tail, lookahead, now.drafting)

    @property
    def max_width(self) -> int:
        return max([*self.trunk, *self.lookahead])

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """Of one pass over `plan`."""
        return self.seconds(plan.width, 1 + plan.drafts, plan.next.drafts, batch)

    def seconds(self, width: int, targets: int, drafts: int = 0, batch: int = 1) -> float:
        """Of one pass: `targets` rows of a window are drawn from, and `drafts` made for the next one. A batch that
        nobody measured is taken for a window of as many rows."""
        if batch in self.batched:
            return self.batched[batch].seconds(width, targets, drafts)
        width, targets, drafts = batch * width, batch * targets, batch * drafts
        trunk = between(self.lookahead if drafts and self.lookahead else self.trunk, width)
        if not drafts:
            return trunk + between(self.tail, targets)
        if not self.drafting:
            return trunk + between(self.tail, targets + drafts)
        return trunk + between(self.drafting, drafts) + between(self.tail, targets) - between(self.tail, 1)


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
    drafts = [draft_plan(length) for length in lengths if length in (1, lookahead)]
    chains = [ar_plan(), *(verify_plan(length) for length in lengths), *drafts]
    narrow = [plan for plan in chains if plan.width * batch <= WIDEST or plan.width == 1]
    return list(dict.fromkeys([*narrow, *fused[(len(fused) - 1) // 2 :][:1], *fused[-1:]]))


def measure(time: Timer, plans: Sequence[Plan]) -> PassTimes:
    """Time passes over `plans`, `ar` among them, in alternation.

    Of each plan it is the least, since whatever disturbs a pass, as being the first, only makes it slower. A plan whose
    two least times agree is not timed again.
    """
    seconds: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(REPEATS):
        for plan in plans:
            if number < (WIDE_REPEATS if plan.width > WIDE else REPEATS) and not _agree(seconds[plan]):
                seconds[plan].append(time(plan))
    times = PassTimes({}, {})
    for plan, passes in seconds.items():
        trunk = times.lookahead if plan.next.drafts else times.trunk
        trunk[plan.width] = min(each[0] for each in passes)
        tail = times.drafting if plan.next.drafts else times.tail
        if not plan.is_fused:  # whose tails draw several targets and make drafts too
            tail[plan.next.drafts or 1 + plan.drafts] = min(each[1] for each in passes)
    return times


def _agree(passes: Sequence[tuple[float, float]]) -> bool:
    """Whether the two least times of a pass, of trunk and tail together, are nearly alike."""
    least = sorted(trunk + tail for trunk, tail in passes)[:2]
    return len(least) == 2 and least[1] <= AGREE * least[0]
