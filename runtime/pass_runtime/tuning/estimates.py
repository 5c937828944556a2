"""What the mode `auto` measures: how long passes take, and how often drafts are accepted. `tuner`
chooses plans by both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

Floats = npt.NDArray[np.float64]

AVERAGED_PASSES = 200.0
"""About how many passes an acceptance rate is averaged over."""
PRIOR_PASSES = 10.0
"""The initial rates of a `ConditionalAcceptance` weigh as much as this many passes."""

FORCED_MATCH = -1
"""Takes the place of the length of an n-gram match if a grammar forces the drafts."""


def cumulative_acceptance(rates: Sequence[float]) -> Floats:
    """Return [L+1]: for i from 0 to L, the probability that the first i drafts of a chain are all
    accepted. rates [L]: as `ConditionalAcceptance.rates`."""
    cumulative: Floats = np.cumprod(np.array([1.0, *rates]))
    return cumulative


class ConditionalAcceptance:
    """For each position i of a chain, how often draft i is accepted if all drafts before it are."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_PASSES) -> None:
        """prior: the initial rates, which weigh as much as `weight` passes."""
        self._prior = list(prior)
        self._hits = [rate * weight for rate in prior]
        self._trials = [weight] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """Count one pass that accepted `accepted` of `drafted` drafts. Older passes lose weight."""
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / AVERAGED_PASSES)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / AVERAGED_PASSES)
        # Every draft was accepted, so one more draft would probably be accepted about as often.
        if drafted == accepted < len(self._prior):
            self._pull(drafted, self.rates[drafted - 1], 1 / AVERAGED_PASSES)

    def forget(self) -> None:
        """Count a pass that verified none of these drafts: move the rates towards the initial ones,
        8 times as slowly as `record` does, so that such drafts are tried again at some time."""
        for i, rate in enumerate(self._prior):
            self._pull(i, rate, 1 / (8 * AVERAGED_PASSES))

    def _pull(self, i: int, rate: float, share: float) -> None:
        """Move the rate of position i towards `rate` by `share` of the difference."""
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share


AGREEMENT_RATIO = 1.1
"""Passes of a plan are timed until the second shortest time is at most this many times the
shortest, or TIMED_RUNS were timed."""
TIMED_RUNS, TIMED_WIDE_RUNS, WIDE_WINDOW_ROWS = 4, 2, 8
"""At most how many passes of a plan are timed, and of a plan whose window has more than
WIDE_WINDOW_ROWS rows: such passes take long and are seldom the fastest."""
MAX_TIMED_ROWS = 64
"""Passes with more rows, of all slots together, are not timed: they were fastest on no machine."""
TILE_GROUPS = ((2, 2, 1), (3, 3, 3, 3))
"""The group sizes of two fused windows, which have 8 and 16 rows. They are timed because CPUs and
GPUs multiply matrices in tiles of 8 or 16 rows, and one more row would take one more tile."""

SLOWNESS_PASSES, RATIO_PASSES = 4, 32
"""How many passes two moving averages of `PassTimes` span: the slowness, and a shape's ratio."""
MAX_DEVIATION = 1.2
"""A pass counts as at most this many times slower or faster than expected: pauses do not repeat."""
MIN_PASS_SECONDS = 1e-9
FAR_X = 1_000_000
"""How far beyond its last point a piecewise linear function is extended: beyond any pass."""

TimePass = Callable[[Plan], tuple[float, float]]
"""A function that runs one pass with a plan and returns the seconds of trunk and tail."""


class PassShape(NamedTuple):
    """What the time of a pass depends on, summed over all slots. rows: the rows of the windows.
    sampled: the rows that tokens are sampled from, which are roots and drafts. drafts: the drafts
    that the pass makes for the next windows."""

    rows: int
    sampled: int
    drafts: int


def shape_of(plan: Plan, batch: int = 1) -> PassShape:
    """Return the shape of a pass with `plan` over `batch` slots."""
    return PassShape(batch * plan.width, batch * (1 + plan.drafts), batch * plan.next.drafts)


def _line(points: Mapping[int, float], *, flat: bool = False) -> Callable[[int], float]:
    """Return a piecewise linear function through `points` (x -> y), in which a point is raised to
    the one before it if it is lower. Before the first point the function is constant. Beyond the
    last, its slope is that of the last piece or of the line from the first point to the last,
    whichever is steeper; 0 if `flat`."""
    xs = sorted(points)
    ys = list(accumulate((points[x] for x in xs), max))
    slope = 0.0
    if len(xs) > 1 and not flat:
        slope = max((ys[-1] - ys[i]) / (xs[-1] - xs[i]) for i in (0, -2))
    xs, ys = [*xs, xs[-1] + FAR_X], [*ys, ys[-1] + FAR_X * slope]
    return lambda x: float(np.interp(x, xs, ys))


class PassTimes:
    """The seconds of a pass by its shape: an estimate, times a correction for this shape (its
    ratio), times the slowness of all passes (on a busy machine, or in a longer text). Ratios and
    slowness are learned from the passes that run.

    The estimate is the sum of four piecewise linear functions through timed passes: the trunk by
    rows, its extra time with look-ahead rows, the tail by sampled rows, its extra time by drafts.
    """

    def __init__(
        self, timed: Mapping[PassShape, tuple[float, float]], other_sampler: PassTimes | None = None
    ) -> None:
        """timed: seconds of trunk and tail by shape. other_sampler: the times for another sampler,
        None for the first one. The trunk does not depend on the sampler, so its functions are taken
        from `other_sampler`, and the slowness is how slow it is now: `timed` needs few shapes."""
        plain = {shape: seconds for shape, seconds in timed.items() if not shape.drafts}
        drafting = {shape: seconds for shape, seconds in timed.items() if shape.drafts}
        self.slowness = 1.0
        self._ratios = dict[PassShape, float]()
        self._estimates = dict[PassShape, float]()
        self.pass_counts: dict[PassShape, int] = {}  # recorded passes by shape
        if other_sampler is None:
            self.timed_widths = sorted({shape.rows for shape in timed})
            trunks = {shape.rows: trunk for shape, (trunk, _) in plain.items()}
            adapter_seconds = {
                shape.rows: max(trunk - trunks[shape.rows], 0.0)
                for shape, (trunk, _) in drafting.items()
                if shape.rows in trunks
            }
            # the extra seconds of a trunk with look-ahead rows, by rows
            self._adapter = _line(adapter_seconds or {0: 0.0}, flat=True)
            without_adapter = {
                shape.rows: trunk - self._adapter(shape.rows)
                for shape, (trunk, _) in drafting.items()
            }
            trunks = {**without_adapter, **trunks}
            if len(trunks) < 2:
                # Half of the only time counts as due to the rows: more rows must not look free.
                trunks[0] = sum(trunks.values()) / 2
            self._trunk = _line(trunks)
        else:
            self.timed_widths, self._trunk = other_sampler.timed_widths, other_sampler._trunk
            self._adapter, self._ratios = other_sampler._adapter, dict(other_sampler._ratios)
            self.slowness = sum(trunk for trunk, _ in timed.values()) / sum(
                map(self._trunk_seconds, timed)
            )
        # `seconds` multiplies its estimate by the slowness: divide the timed seconds by it.
        self._tail = _line(
            {shape.sampled: tail / self.slowness for shape, (_, tail) in plain.items()}
        )
        draft_seconds = {
            shape.drafts: tail / self.slowness - self._tail(shape.sampled)
            for shape, (_, tail) in drafting.items()
        }
        self._drafts = _line({0: 0.0, **draft_seconds})

    def _trunk_seconds(self, shape: PassShape) -> float:
        """Return the estimate for the trunk alone."""
        return self._trunk(shape.rows) + (self._adapter(shape.rows) if shape.drafts else 0.0)

    def seconds(self, shape: PassShape) -> float:
        """Return the expected seconds of one pass."""
        if shape not in self._estimates:
            tail = self._tail(shape.sampled) + self._drafts(shape.drafts)
            self._estimates[shape] = max(self._trunk_seconds(shape) + tail, MIN_PASS_SECONDS)
        return self._estimates[shape] * self._ratios.get(shape, 1.0) * self.slowness

    def record(self, shape: PassShape, seconds: float) -> None:
        """Learn from a pass that took `seconds`. The first passes of a shape change mostly its
        ratio, later passes mostly the slowness. What all ratios have in common belongs to the
        slowness, so the product of the ratios is kept at 1."""
        relative = seconds / self.seconds(shape)
        excess = min(max(relative, 1 / MAX_DEVIATION), MAX_DEVIATION) - 1.0
        count = self.pass_counts[shape] = self.pass_counts.get(shape, 0) + 1
        ratio_change = 1.0 + excess / min(count + SLOWNESS_PASSES - 1, RATIO_PASSES)
        self._ratios[shape] = self._ratios.get(shape, 1.0) * ratio_change
        # The product was 1 before, so this is now the geometric mean of the ratios.
        mean = ratio_change ** (1 / len(self._ratios))
        self._ratios = {each: ratio / mean for each, ratio in self._ratios.items()}
        # The expected seconds of this shape change by 1 / SLOWNESS_PASSES of the excess in all.
        self.slowness *= (1.0 + excess / SLOWNESS_PASSES) / ratio_change * mean


def probe_plans(lookahead: int, batch: int = 1) -> list[Plan]:
    """Return the plans to time for a bundle whose look-ahead is `lookahead`: a few from the
    narrowest to the widest, because the times of the plans in between are nearly linear."""
    lengths, tiles = [1, lookahead], [*TILE_GROUPS]
    if lookahead > 5:  # With many widths, one more plan in the middle replaces the 8-row tile.
        lengths, tiles = [1, 4, lookahead], tiles[1:]
    fused = [fused_plan([length] * (length + 1)) for length in range(1, lookahead + 1)]
    widest = [plan for plan in fused if plan.width * batch <= MAX_TIMED_ROWS][-1:]
    tile_plans = [fused_plan(groups) for groups in tiles if len(groups) <= lookahead + 1]
    drafts = map(draft_plan, (1, lookahead))
    plans = [ar_plan(), *map(verify_plan, lengths), *drafts, *tile_plans, *widest]
    max_rows = max(MAX_TIMED_ROWS, batch)  # Plain passes are always timed.
    return [plan for plan in dict.fromkeys(plans) if plan.width * batch <= max_rows]


def measure(time_pass: TimePass, plans: Sequence[Plan]) -> dict[Plan, tuple[float, float]]:
    """Time passes with each of `plans`, in turns. Return each plan's seconds of trunk and tail.

    The shortest time of each plan counts, since disturbances only make a pass slower. A plan whose
    two shortest times agree is not timed again.

    Passes that decode take up to a tenth longer than the returned times: about 4 % because they are
    not the shortest, and 0.13 ms because the host reads what they emitted. `PassTimes.slowness`
    learns that. Two plans that alternate, as in `two-pass`, take no longer than each by itself.
    """
    times: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(TIMED_RUNS):
        for plan in plans:
            if number >= TIMED_WIDE_RUNS and plan.width > WIDE_WINDOW_ROWS:
                continue
            shortest = sorted(map(sum, times[plan]))[:2]
            if len(shortest) < 2 or shortest[1] > AGREEMENT_RATIO * shortest[0]:
                times[plan].append(time_pass(plan))
    return {
        plan: (min(trunk for trunk, _ in seconds), min(tail for _, tail in seconds))
        for plan, seconds in times.items()
    }
