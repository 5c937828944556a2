"""What `auto` measures: how long passes take, and how often drafts are accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

Floats = npt.NDArray[np.float64]

AVERAGED_PASSES = 200.0
"""Passes that an acceptance rate is averaged over."""
PRIOR_PASSES = 10.0
"""The default weight of the initial rates, in passes."""

FORCED = -1
"""Stands for the length of an n-gram's match if a grammar forces the drafts."""


def cumulative_of(rates: Sequence[float]) -> Floats:
    """[L] conditional acceptance -> [L+1] cumulative: the probabilities that the first i drafts are all accepted."""
    cumulative: Floats = np.cumprod(np.array([1.0, *rates]))
    return cumulative


class ConditionalAcceptance:
    """By position i: the rate at which draft i is accepted where all drafts before it were."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_PASSES) -> None:
        self._prior = list(prior)
        self._hits = [rate * weight for rate in prior]
        self._trials = [weight] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """Count one pass that accepted `accepted` of `drafted` drafts. The weight of older passes fades."""
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / AVERAGED_PASSES)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / AVERAGED_PASSES)
        if drafted == accepted < len(self._prior):  # where all drafts were accepted, the next one is likelier to be
            self._pull(drafted, self.rates[drafted - 1], 1 / AVERAGED_PASSES)

    def forget(self) -> None:
        """Count a pass without such drafts: the rates drift slowly back to the first ones, so that drafts are tried
        again."""
        for i, rate in enumerate(self._prior):
            self._pull(i, rate, 1 / (8 * AVERAGED_PASSES))

    def _pull(self, i: int, rate: float, share: float) -> None:
        """Move rate i towards `rate` by this share of the difference."""
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share


AGREEMENT_RATIO = 1.1
"""A pass is timed until its second shortest time is at most this many times its shortest."""
TIMED_RUNS, TIMED_WIDE_RUNS, WIDE_WINDOW_ROWS = 4, 2, 8
"""The most timings of a pass, and of one with more than WIDE_WINDOW_ROWS rows, which takes long and matters little."""
MAX_TIMED_ROWS = 64
"""Passes with more rows, of all slots together, are not timed: they paid on no machine."""
TILE_GROUPS = ((2, 2, 1), (3, 3, 3, 3))
"""Group sizes of the fused windows with 8 and 16 rows, which are timed because processors multiply in tiles of so many
rows: one more row takes another tile."""

LATEST_PASSES, SHAPE_PASSES = 4, 32
"""Windows of two moving averages: the slowness of all passes, and the ratio of one shape to the others."""
MAX_RATIO = 1.2
"""A pass counts as at most so many times slower or faster than expected: a pause says nothing about later ones."""
MIN_PASS_SECONDS, FAR_ROWS = 1e-9, 1_000_000

Timer = Callable[[Plan], tuple[float, float]]
"""Times one pass over a plan; returns the seconds of trunk and tail."""


class PassShape(NamedTuple):
    """What the time of a pass depends on, for all slots together: rows of the windows, rows that tokens are sampled
    from, and drafts that are made."""

    rows: int
    sampled: int
    drafts: int


def shape_of(plan: Plan, batch: int = 1) -> PassShape:
    """The shape of a pass over `plan` in `batch` slots."""
    return PassShape(batch * plan.width, batch * (1 + plan.drafts), batch * plan.next.drafts)


def _line(points: Mapping[int, float], *, flat: bool = False) -> Callable[[int], float]:
    """Straight lines between points, which never fall, and level before the first. Beyond the last they are as steep as
    the last of them or all in the mean, whichever is steeper; level if `flat`."""
    xs = sorted(points)
    ys = list(accumulate((points[x] for x in xs), max))
    rises = [] if flat else [(ys[-1] - ys[i]) / (xs[-1] - xs[i]) for i in {0, len(xs) - 2} if len(xs) > 1]
    xs, ys = [*xs, xs[-1] + FAR_ROWS], [*ys, ys[-1] + FAR_ROWS * max(rises, default=0.0)]
    return lambda x: float(np.interp(x, xs, ys))


class PassTimes:
    """Seconds of a pass by its shape: what timed passes say, times a ratio that this shape was found to have, times the
    slowness that all passes have in common, on a busy machine or in a longer text.

    What timed passes say is the sum of four lines: the trunk by rows, what it takes more with look-ahead rows, the tail
    by sampled rows, and what it takes more by drafts.
    """

    def __init__(self, timed: Mapping[PassShape, tuple[float, float]], like: PassTimes | None = None) -> None:
        """timed: seconds of trunk and tail by shape. like: the times for another sampler, which differ in the tail and,
        as the machine's speed may have changed, by a factor. Few shapes need be timed then."""
        plain = {shape: seconds for shape, seconds in timed.items() if not shape.drafts}
        drafting = {shape: seconds for shape, seconds in timed.items() if shape.drafts}
        self.slowness, self._ratios, self._expected = 1.0, dict[PassShape, float](), dict[PassShape, float]()
        self.passes: dict[PassShape, int] = {}  # that ran
        if like is None:
            self.rows = sorted({shape.rows for shape in timed})
            rows = {shape.rows: trunk for shape, (trunk, _) in plain.items()}
            more = {s.rows: max(t - rows[s.rows], 0.0) for s, (t, _) in drafting.items() if s.rows in rows}
            self._adapter = _line(more or {0: 0.0}, flat=True)
            rows = {shape.rows: trunk - self._adapter(shape.rows) for shape, (trunk, _) in drafting.items()} | rows
            # If one width alone was timed, half of it is taken to be due to the rows, so that none looks free.
            self._trunk = _line(rows if len(rows) > 1 else {0: sum(rows.values()) / 2, **rows})
        else:
            self.rows, self._trunk, self._adapter = like.rows, like._trunk, like._adapter
            self._ratios = dict(like._ratios)
            self.slowness = sum(trunk for trunk, _ in timed.values()) / sum(map(self._trunk_seconds, timed))
        self._tail = _line({shape.sampled: tail / self.slowness for shape, (_, tail) in plain.items()})
        more = {shape.drafts: tail / self.slowness - self._tail(shape.sampled) for shape, (_, tail) in drafting.items()}
        self._drafts = _line({0: 0.0, **more})

    def _trunk_seconds(self, shape: PassShape) -> float:
        return self._trunk(shape.rows) + (self._adapter(shape.rows) if shape.drafts else 0.0)

    def seconds(self, shape: PassShape) -> float:
        """The seconds of one pass."""
        if shape not in self._expected:
            tail = self._tail(shape.sampled) + self._drafts(shape.drafts)
            self._expected[shape] = max(self._trunk_seconds(shape) + tail, MIN_PASS_SECONDS)
        return self._expected[shape] * self._ratios.get(shape, 1.0) * self.slowness

    def record(self, shape: PassShape, seconds: float) -> None:
        """Correct the estimate by a pass that took so long: at first the ratio of its shape, relative to those of the
        shapes that ran, and later the slowness of all."""
        deviation = min(max(seconds / self.seconds(shape), 1 / MAX_RATIO), MAX_RATIO) - 1.0
        self.passes[shape] = self.passes.get(shape, 0) + 1
        change = 1.0 + deviation / min(self.passes[shape] + LATEST_PASSES - 1, SHAPE_PASSES)
        self._ratios[shape] = self._ratios.get(shape, 1.0) * change
        mean = change ** (1 / len(self._ratios))
        self._ratios = {ran: ratio / mean for ran, ratio in self._ratios.items()}  # their product is 1
        self.slowness *= (1.0 + deviation / LATEST_PASSES) / change * mean


def probe_plans(lookahead: int, batch: int = 1) -> list[Plan]:
    """The plans to time: few of them, from the narrowest to the widest that a bundle with `lookahead` look-ahead rows
    has, since pass times are nearly linear in between."""
    lengths, tiles = ([1, 4, lookahead], TILE_GROUPS[1:]) if lookahead > 5 else ([1, lookahead], TILE_GROUPS)
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    widest = [plan for plan in fused if plan.width * batch <= MAX_TIMED_ROWS][-1:]
    shapes = [fused_plan(groups) for groups in tiles if len(groups) <= lookahead + 1]
    drafts = map(draft_plan, (1, lookahead))
    plans = [ar_plan(), *map(verify_plan, lengths), *drafts, *shapes, *widest]
    return [plan for plan in dict.fromkeys(plans) if plan.width * batch <= MAX_TIMED_ROWS or plan.width == 1]


def measure(time: Timer, plans: Sequence[Plan]) -> dict[Plan, tuple[float, float]]:
    """Time passes over `plans` in alternation; seconds of trunk and tail.

    The shortest time of each plan counts, since disturbances only make a pass slower. A plan whose two shortest times
    agree is not timed again.
    """
    seconds: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(TIMED_RUNS):
        for plan in plans if number < TIMED_WIDE_RUNS else [plan for plan in plans if plan.width <= WIDE_WINDOW_ROWS]:
            least = sorted(map(sum, seconds[plan]))[:2]
            if len(least) < 2 or least[1] > AGREEMENT_RATIO * least[0]:
                seconds[plan].append(time(plan))
    return {plan: (min(t for t, _ in passes), min(t for _, t in passes)) for plan, passes in seconds.items()}
