"""What a pass costs on this machine: a linear model, fitted to a few timed passes and corrected by every later one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.plan import Plan, ar_plan, draft_plan, fused_plan, verify_plan

AGREE = 1.1
"""A pass is not timed again once its two shortest times are within this ratio."""
REPEATS, WIDE_REPEATS, WIDE = 4, 2, 8
"""How often a pass is timed at most, and one over more than WIDE rows: those take longest and matter least."""
WIDEST = 64
"""Passes over more rows, of all slots together, are not timed: they were not seen to pay anywhere."""

TERMS = ("pass", "row", "adapter", "look-ahead row", "tail", "sampled row", "draft")
"""What the seconds of a pass are a sum of. Its trunk runs the adapter where the pass makes drafts, and takes something
more for a look-ahead row than for another; in its tail a draft is a sampled row and a run of the draft head."""
TAIL = (4, 5, 6)
SPREAD, STEP = (10.0, 1.0, 1.0, 0.1, 1.0, 0.3, 0.3), 0.2
"""Before any pass was timed, the standard deviation of each term in plain passes, and of a step in trunks as wide."""
NOISE, LEAST_NOISE, NOISE_MEMORY, OUTLIER = 0.05, 0.01, 16, 3.0
"""How far passes are from what is expected of them, relative to that: at first; at least; an average over so many. A
pass that is further away than OUTLIER times that counts as one that is so far away."""
LEAST_SECONDS = 1e-9
DRIFT, STEP_DRIFT = 1 / 8, 1 / 48
"""How much may change from pass to pass, in times of the noise: the speed of all passes, and the step of one width."""

Floats = npt.NDArray[np.float64]
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


class PassTimes:
    """Seconds of a pass: the sum of TERMS, and a step at each number of rows that was timed, which is how far the trunk
    is from the line there. Steps are interpolated in between.

    Terms and steps are estimated together by a Kalman filter. Timed passes fit them, and later ones correct them: what
    changes for all passes (a busy machine, a longer text) is followed fast, what changes for one width slowly.
    """

    def __init__(self, timed: Mapping[PassShape, tuple[float, float]], like: PassTimes | None = None) -> None:
        """timed: seconds of trunk and tail by shape. like: the times for another sampler, which differ in the tail and,
        as the machine's speed may have changed, by a factor. Few shapes need be timed then."""
        self.noise, plain = NOISE, sum(timed[min(timed)])
        self._known: dict[PassShape, Floats] = {}  # what `_terms` found
        if like is None:
            self.rows = sorted({shape.rows for shape in timed})
            # Half of a plain pass is taken to be due to its rows: none looks free where one width alone was timed.
            mean = np.array([plain / 2, plain / 2 / self.rows[0], *[0.0] * (len(TERMS) - 2 + len(self.rows))])
            trunk = {shape.rows: seconds for shape, (seconds, _) in timed.items()}
            spread = np.array([*(plain * share for share in SPREAD), *(STEP * trunk[rows] for rows in self.rows)])
            self._fit(timed, mean, np.diag((spread / NOISE) ** 2))
        else:
            self.rows, mean = like.rows, like._values
            tail = np.isin(np.arange(len(mean)), TAIL) * plain
            self._fit(timed, mean, like._covariance + (np.outer(mean, mean) + np.diag(tail**2)) / NOISE**2)

    def _fit(self, timed: Mapping[PassShape, tuple[float, float]], mean: Floats, covariance: Floats) -> None:
        """Take up timed passes one after another. A term that would be negative is fixed at zero."""
        kept, tail = np.ones(len(mean)), np.isin(np.arange(len(mean)), TAIL)
        while True:
            self._values, self._covariance = mean * kept, covariance * np.outer(kept, kept)
            for shape, seconds in timed.items():
                for part, of_part in zip(seconds, (~tail, tail), strict=True):
                    terms = self._terms(shape) * of_part / sum(seconds)
                    self._correct(terms, part / sum(seconds) - float(terms @ self._values))
            negative = np.flatnonzero(self._values[: len(TERMS)] < 0.0)
            if not negative.size:
                return self._bound()
            kept[negative] = 0.0

    @property
    def terms(self) -> dict[str, float]:
        """Seconds by name of a term or step."""
        names = [*TERMS, *(f"step at {rows} rows" for rows in self.rows)]
        return dict(zip(names, self._bounded.tolist(), strict=True))

    def seconds(self, shape: PassShape) -> float:
        """The seconds of one pass, which never fall with more rows."""
        return max(float(self._terms(shape) @ self._bounded), LEAST_SECONDS)

    def doubt(self, shapes: Sequence[PassShape], other: PassShape) -> float:
        """The standard deviation of the mean time of `shapes` relative to that of `other`."""
        first, second = (sum(map(self._terms, some), np.zeros(len(self._values))) for some in (shapes, [other]))
        apart = first / (first @ self._bounded) - second / (second @ self._bounded)
        variance = float(apart @ self._covariance @ apart)
        return self.noise * float(max(0.0, variance) ** 0.5)

    def record(self, shape: PassShape, seconds: float) -> None:
        """Correct the estimate by a pass that took so long."""
        terms = self._terms(shape)
        expected = max(float(terms @ self._values), LEAST_SECONDS)
        most = OUTLIER * self.noise
        deviation = min(max(seconds / expected - 1.0, -most / (1.0 + most)), most)
        variance = self.noise**2 + (deviation**2 - self.noise**2) / NOISE_MEMORY
        self.noise = max(float(variance**0.5), LEAST_NOISE)
        drift = STEP_DRIFT * expected * terms
        drift[: len(TERMS)] = 0.0
        self._covariance += DRIFT**2 * np.outer(self._values, self._values) + np.diag(drift**2)
        self._correct(terms / expected, deviation)
        self._bound()

    def _terms(self, shape: PassShape) -> Floats:
        """How often a pass has each term, and what share of each step."""
        if (known := self._known.get(shape)) is not None:
            return known
        drafting, numbers = shape.drafts > 0, np.arange(len(self.rows))
        steps = np.maximum(0.0, 1.0 - abs(numbers - np.interp(shape.rows, self.rows, numbers)))
        lookahead, sampled = drafting * (shape.rows - shape.sampled), shape.sampled + shape.drafts
        self._known[shape] = np.array([1, shape.rows, drafting, lookahead, 1, sampled, shape.drafts, *steps])
        return self._known[shape]

    def _correct(self, terms: Floats, deviation: float) -> None:
        """The sum of `terms`, relative to the time of a pass, is found to deviate by so much."""
        covariance = self._covariance @ terms
        gain = covariance / (1.0 + terms @ covariance)
        self._values += gain * deviation
        self._covariance -= np.outer(gain, covariance)

    def _bound(self) -> None:
        """No term is negative, and the trunk takes no less time with more rows."""
        np.maximum(self._values[: len(TERMS)], 0.0, out=self._values[: len(TERMS)])
        self._bounded = self._values.copy()
        line = self._values[0] + self._values[1] * np.array(self.rows)
        trunk = np.maximum(line + self._values[len(TERMS) :], line / 2)
        self._bounded[len(TERMS) :] = np.maximum.accumulate(trunk) - line


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


def measure(time: Timer, plans: Sequence[Plan]) -> dict[Plan, tuple[float, float]]:
    """Time passes over `plans` in alternation; seconds of trunk and tail.

    The shortest time of each plan counts, since disturbances only make a pass slower. A plan whose two shortest times
    agree is not timed again.
    """
    seconds: dict[Plan, list[tuple[float, float]]] = {plan: [] for plan in plans}
    for number in range(REPEATS):
        for plan in plans:
            if number < (WIDE_REPEATS if plan.width > WIDE else REPEATS) and not _agree(seconds[plan]):
                seconds[plan].append(time(plan))
    return {plan: (min(t for t, _ in passes), min(t for _, t in passes)) for plan, passes in seconds.items()}


def _agree(passes: Sequence[tuple[float, float]]) -> bool:
    """Whether the two shortest times of a pass, trunk and tail together, are within AGREE of each other."""
    least = sorted(trunk + tail for trunk, tail in passes)[:2]
    return len(least) == 2 and least[1] <= AGREE * least[0]
