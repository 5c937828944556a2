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
"""How many passes the initial rates of a `ConditionalAcceptance` count for."""

FORCED_MATCH = -1
"""Stands for the length of the n-gram match if a grammar forces the drafts."""


def cumulative_acceptance(rates: Sequence[float]) -> Floats:
    """[L] conditional acceptance rates -> [L+1]: the probabilities that the first i drafts are all
    accepted."""
    cumulative: Floats = np.cumprod(np.array([1.0, *rates]))
    return cumulative


class ConditionalAcceptance:
    """By position i: the rate at which draft i is accepted if all drafts before it were."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_PASSES) -> None:
        self._prior = list(prior)
        self._hits = [rate * weight for rate in prior]
        self._trials = [weight] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """Count one pass that accepted `accepted` of `drafted` drafts. The weight of older passes
        fades."""
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / AVERAGED_PASSES)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / AVERAGED_PASSES)
        # all were accepted, so the next one is likelier to be accepted, too
        if drafted == accepted < len(self._prior):
            self._pull(drafted, self.rates[drafted - 1], 1 / AVERAGED_PASSES)

    def forget(self) -> None:
        """Count a pass that verified none of these drafts: the rates drift back to the initial
        ones, so that such drafts are tried again."""
        for i, rate in enumerate(self._prior):
            self._pull(i, rate, 1 / (8 * AVERAGED_PASSES))

    def _pull(self, i: int, rate: float, share: float) -> None:
        """Move rate i towards `rate` by this share of the difference."""
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share


AGREEMENT_RATIO = 1.1
"""A pass is timed until its second shortest time is at most this many times its shortest."""
TIMED_RUNS, TIMED_WIDE_RUNS, WIDE_WINDOW_ROWS = 4, 2, 8
"""How often a plan is timed at most; plans with more than WIDE_WINDOW_ROWS rows take long and are
seldom the fastest."""
MAX_TIMED_ROWS = 64
"""Passes with more rows, of all slots together, are not timed: they were faster nowhere."""
TILE_GROUPS = ((2, 2, 1), (3, 3, 3, 3))
"""Group sizes of the fused windows with 8 and 16 rows. They are timed because CPUs and GPUs
multiply matrices in tiles of 8 or 16 rows: a wider window takes one more tile."""

LATEST_PASSES, SHAPE_PASSES = 4, 32
"""How many passes two moving averages span: the slowness of all passes, and the ratio of one shape
to the others."""
MAX_RATIO = 1.2
"""A pass counts as at most so much slower or faster than expected, as pauses do not repeat."""
MIN_PASS_SECONDS = 1e-9
FAR_ROWS = 1_000_000
"""How far a line is extended beyond its last point."""

TimePass = Callable[[Plan], tuple[float, float]]
"""Times one pass with a plan; returns the seconds of trunk and tail."""


class PassShape(NamedTuple):
    """What the time of a pass depends on, for all slots together: rows of the windows, rows that
    tokens are sampled from, and drafts that are made."""

    rows: int
    sampled: int
    drafts: int


def shape_of(plan: Plan, batch: int = 1) -> PassShape:
    """The shape of a pass with `plan` over `batch` slots."""
    return PassShape(batch * plan.width, batch * (1 + plan.drafts), batch * plan.next.drafts)


def _line(points: Mapping[int, float], *, flat: bool = False) -> Callable[[int], float]:
    """A piecewise linear function through `points`, raised if need be so that it never falls. It is
    constant before the first. Beyond the last, it has the slope of the last piece or the mean
    slope, whichever is steeper; 0 if `flat`."""
    xs = sorted(points)
    ys = list(accumulate((points[x] for x in xs), max))
    rises = (
        []
        if flat
        else [(ys[-1] - ys[i]) / (xs[-1] - xs[i]) for i in {0, len(xs) - 2} if len(xs) > 1]
    )
    xs, ys = [*xs, xs[-1] + FAR_ROWS], [*ys, ys[-1] + FAR_ROWS * max(rises, default=0.0)]
    return lambda x: float(np.interp(x, xs, ys))


class PassTimes:
    """Seconds of a pass by its shape: an estimate from timed passes, times the ratio of this shape
    to its estimate, times the slowness of all passes (on a busy machine, or in a longer text).

    The estimate is the sum of four piecewise linear functions: the trunk by rows, its extra time
    with look-ahead rows, the tail by sampled rows, and its extra time by drafts.
    """

    def __init__(
        self, timed: Mapping[PassShape, tuple[float, float]], other_sampler: PassTimes | None = None
    ) -> None:
        """timed: seconds of trunk and tail by shape. other_sampler: the times for another sampler,
        if there are some: its estimate of the trunk is used, scaled by how fast the trunk is now,
        so that `timed` needs few shapes."""
        plain = {shape: seconds for shape, seconds in timed.items() if not shape.drafts}
        drafting = {shape: seconds for shape, seconds in timed.items() if shape.drafts}
        self.slowness = 1.0
        self._ratios = dict[PassShape, float]()
        self._expected = dict[PassShape, float]()
        self.passes: dict[PassShape, int] = {}  # how many ran
        if other_sampler is None:
            self.timed_widths = sorted({shape.rows for shape in timed})
            trunks = {shape.rows: trunk for shape, (trunk, _) in plain.items()}
            adapter_seconds = {
                s.rows: max(t - trunks[s.rows], 0.0)
                for s, (t, _) in drafting.items()
                if s.rows in trunks
            }
            # extra seconds of a trunk with look-ahead rows
            self._adapter = _line(adapter_seconds or {0: 0.0}, flat=True)
            trunks = {
                shape.rows: trunk - self._adapter(shape.rows)
                for shape, (trunk, _) in drafting.items()
            } | trunks
            # If one width alone was timed, half of its time counts as due to its rows: more rows
            # must not look free.
            self._trunk = _line(
                trunks if len(trunks) > 1 else {0: sum(trunks.values()) / 2, **trunks}
            )
        else:
            self.timed_widths, self._trunk = other_sampler.timed_widths, other_sampler._trunk
            self._adapter, self._ratios = other_sampler._adapter, dict(other_sampler._ratios)
            self.slowness = sum(trunk for trunk, _ in timed.values()) / sum(
                map(self._trunk_seconds, timed)
            )
        self._tail = _line(
            {shape.sampled: tail / self.slowness for shape, (_, tail) in plain.items()}
        )
        draft_seconds = {
            shape.drafts: tail / self.slowness - self._tail(shape.sampled)
            for shape, (_, tail) in drafting.items()
        }
        self._drafts = _line({0: 0.0, **draft_seconds})

    def _trunk_seconds(self, shape: PassShape) -> float:
        return self._trunk(shape.rows) + (self._adapter(shape.rows) if shape.drafts else 0.0)

    def seconds(self, shape: PassShape) -> float:
        """The seconds of one pass."""
        if shape not in self._expected:
            tail = self._tail(shape.sampled) + self._drafts(shape.drafts)
            self._expected[shape] = max(self._trunk_seconds(shape) + tail, MIN_PASS_SECONDS)
        return self._expected[shape] * self._ratios.get(shape, 1.0) * self.slowness

    def record(self, shape: PassShape, seconds: float) -> None:
        """Correct the estimate by a pass that took `seconds`. The first passes of a shape correct
        mostly its ratio, later passes mostly the slowness of all shapes. The product of all ratios
        is kept at 1: what they have in common belongs to the slowness."""
        deviation = min(max(seconds / self.seconds(shape), 1 / MAX_RATIO), MAX_RATIO) - 1.0
        self.passes[shape] = self.passes.get(shape, 0) + 1
        change = 1.0 + deviation / min(self.passes[shape] + LATEST_PASSES - 1, SHAPE_PASSES)
        self._ratios[shape] = self._ratios.get(shape, 1.0) * change
        mean = change ** (1 / len(self._ratios))
        # their product is 1
        self._ratios = {ran: ratio / mean for ran, ratio in self._ratios.items()}
        self.slowness *= (1.0 + deviation / LATEST_PASSES) / change * mean


def probe_plans(lookahead: int, batch: int = 1) -> list[Plan]:
    """The plans to time: a few from the narrowest to the widest of a bundle with look-ahead
    `lookahead`; in between, pass times are nearly linear."""
    wide = lookahead > 5
    lengths, tiles = ([1, 4, lookahead] if wide else [1, lookahead]), TILE_GROUPS[wide:]
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    widest = [plan for plan in fused if plan.width * batch <= MAX_TIMED_ROWS][-1:]
    tile_plans = [fused_plan(groups) for groups in tiles if len(groups) <= lookahead + 1]
    drafts = map(draft_plan, (1, lookahead))
    plans = [ar_plan(), *map(verify_plan, lengths), *drafts, *tile_plans, *widest]
    limit = max(MAX_TIMED_ROWS, batch)  # plain passes are always timed
    return [plan for plan in dict.fromkeys(plans) if plan.width * batch <= limit]


def measure(time_pass: TimePass, plans: Sequence[Plan]) -> dict[Plan, tuple[float, float]]:
    """Time passes with each of `plans`, in turns. Return each plan's seconds of trunk and tail.

    The shortest time of each plan counts, since disturbances only make a pass slower. A plan whose
    two shortest times agree is not timed again. So passes in use take up to a tenth longer: about
    4 % because they are not the shortest, and 0.13 ms because the host reads what they emitted.
    That two kinds alternate, as in `two-pass`, costs nothing. `PassTimes.slowness` corrects it.
    """
    seconds: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(TIMED_RUNS):
        for plan in plans:
            if number >= TIMED_WIDE_RUNS and plan.width > WIDE_WINDOW_ROWS:
                continue
            shortest = sorted(map(sum, seconds[plan]))[:2]
            if len(shortest) < 2 or shortest[1] > AGREEMENT_RATIO * shortest[0]:
                seconds[plan].append(time_pass(plan))
    return {
        plan: (min(trunk for trunk, _ in passes), min(tail for _, tail in passes))
        for plan, passes in seconds.items()
    }
