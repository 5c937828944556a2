"""How long a pass takes on this machine: the trunk by batch size and window width, the tail by rows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

AGREE = 1.1
"""A pass is not timed again once its two shortest times are within this ratio."""
REPEATS, WIDE_REPEATS, WIDE = 4, 2, 8
"""How often a pass is timed at most, and one over more than WIDE rows: those take longest and matter least."""
WIDEST = 64
"""Passes over more rows, of all slots together, are not timed: they were not seen to pay anywhere."""

Points = dict[int, float]
"""Seconds by number of rows."""
Timer = Callable[[Plan], tuple[float, float]]
"""Times one pass over a plan; returns the seconds of trunk and tail."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass, linear between the timed points and beyond them. Passes with look-ahead rows have curves of
    their own: an adapter costs the same for one look-ahead row as for many, and a draft head runs once for each draft.
    Where those curves are empty, such a pass is estimated as one without look-ahead rows and of the same width."""

    trunk: Points
    """By window width, without look-ahead rows."""
    tail: Points
    """By rows that tokens are sampled from, in passes that make no drafts."""
    lookahead: Points = field(default_factory=dict)
    """The trunk by window width, with look-ahead rows."""
    drafting: Points = field(default_factory=dict)
    """The tail by the drafts that it makes, in passes that sample one token besides."""
    batched: dict[int, PassTimes] = field(default_factory=dict)
    """The times for each other batch size that was timed, by rows of one slot."""

    def with_tail(self, now: PassTimes) -> PassTimes:
        """Times for another sampler, of whose passes `now` timed fewer widths. The tail is that of `now`. The trunk is
        this one's, multiplied by the mean ratio of the two where both were timed, as the machine's speed may have
        changed in between."""
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
        """The seconds of one pass over `plan`."""
        return self.seconds(plan.width, 1 + plan.drafts, plan.next.drafts, batch)

    def seconds(self, width: int, targets: int, drafts: int = 0, batch: int = 1) -> float:
        """The seconds of one pass that samples from `targets` rows of each window and makes `drafts` drafts. A batch
        size that was not timed counts as one window with as many rows."""
        if batch in self.batched:
            return self.batched[batch].seconds(width, targets, drafts)
        width, targets, drafts = batch * width, batch * targets, batch * drafts
        if not drafts:
            return between(self.trunk, width) + between(self.tail, targets)
        if not self.drafting:
            return self._lookahead_trunk(width) + between(self.tail, targets + drafts)
        plain = between(self.tail, 1)  # the time without drafts, a second point for the line where only one was timed
        tail = between({0: plain, **self.drafting}, drafts) + between(self.tail, targets) - plain
        return self._lookahead_trunk(width) + tail

    def _lookahead_trunk(self, width: int) -> float:
        """The trunk over a window of `width` rows with look-ahead rows among them. Where such windows were timed at one
        width alone, the same difference to windows without look-ahead rows is added at every width."""
        if len(self.lookahead) > 1:
            return between(self.lookahead, width)
        added = [seconds - between(self.trunk, timed) for timed, seconds in self.lookahead.items()]
        return between(self.trunk, width) + max([0.0, *added])


def between(points: Points, at: int) -> float:
    """Interpolate linearly between the points. Beyond the last one, extrapolate with the mean slope, or 0 if that is
    negative.

    ValueError where there are too few points: none, or a single one at another number of rows.
    """
    x = sorted(points)
    y = [points[i] for i in x]
    if len(x) < 2 and at not in points:
        raise ValueError(f"times of passes over {x} rows do not say how long one over {at} takes")
    if at > x[-1]:
        return y[-1] + (at - x[-1]) * max(0.0, (y[-1] - y[0]) / (x[-1] - x[0]))
    return float(np.interp(at, x, y))


def probe_plans(lookahead: int, batch: int = 1) -> list[Plan]:
    """The plans to time: few of them, from the narrowest to the widest that a bundle with `lookahead` look-ahead rows
    has, since pass times are nearly linear in between."""
    lengths = sorted({length for length in (1, 4, lookahead) if length <= lookahead})
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    fused = [plan for plan in fused if plan.width * batch <= WIDEST]
    drafts = [draft_plan(length) for length in lengths if length in (1, lookahead)]
    plain = [ar_plan(), *(verify_plan(length) for length in lengths), *drafts]
    narrow = [plan for plan in plain if plan.width * batch <= WIDEST or plan.width == 1]
    return list(dict.fromkeys([*narrow, *fused[(len(fused) - 1) // 2 :][:1], *fused[-1:]]))


def measure(time: Timer, plans: Sequence[Plan]) -> PassTimes:
    """Time passes over `plans`, which include `ar`, in alternation.

    The shortest time of each plan counts, since disturbances only make a pass slower. A plan whose two shortest times
    agree is not timed again.
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
        if not plan.is_fused:  # a fused tail samples several tokens and makes drafts, so it is on neither curve
            tail[plan.next.drafts or 1 + plan.drafts] = min(each[1] for each in passes)
    return times


def _agree(passes: Sequence[tuple[float, float]]) -> bool:
    """Whether the two shortest times of a pass, trunk and tail together, are within AGREE of each other."""
    least = sorted(trunk + tail for trunk, tail in passes)[:2]
    return len(least) == 2 and least[1] <= AGREE * least[0]
