"""Machines whose pass times are formulas, and simulated decoding, which adds up their seconds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from best_shapes import best_shape

from pass_runtime.backends.base import Batch, Capabilities, Drafts
from pass_runtime.bundle.plan import Plan, fused_plan, make_plan
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.window import COPY_DRAFTS, Window, ar_window, copy_window, verify_window
from pass_runtime.decode.next_pass import Proposed, Situation
from pass_runtime.tuning.auto import (
    Acceptance,
    Auto,
    PassShape,
    PassTimes,
    Rates,
    Tuner,
    Verified,
    probe_windows,
    shape_of,
)


class FixedTimes(PassTimes):
    def record(self, shape: PassShape, seconds: float) -> None:
        pass


Tail = Callable[[int], float]


def times_by_rows(
    trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0, kind: type[PassTimes] = PassTimes
) -> PassTimes:
    """trunk, tail: seconds by rows."""
    shapes = [
        shape
        for rows in trunk
        for shape in {PassShape(rows, rows, 0), PassShape(rows, 1, rows - 1)}
    ]
    return kind({shape: (trunk[shape.rows], tail(shape.rows)) for shape in shapes})


def fixed_times(trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0) -> PassTimes:
    return times_by_rows(trunk, tail, FixedTimes)


FREE_ROWS = fixed_times({1: 1.0, 25: 1.0})
"""More rows take no more time."""
EXPENSIVE_ROWS = fixed_times({1: 1.0, 25: 25.0})
"""Every row takes as long as the first."""


@dataclass(frozen=True)
class Machine:
    trunk: Callable[[int], float]
    adapter: float = 0.0
    lookahead: float = 0.0
    tail: float = 0.0
    sampled: float = 0.0
    draft: float = 0.0
    noise: float = 0.0
    pauses: float = 0.0

    def parts(self, shape: PassShape) -> tuple[float, float]:
        rows, sampled, drafts = shape
        trunk = self.trunk(rows) + (self.adapter + self.lookahead * (rows - sampled)) * (drafts > 0)
        return trunk, self.tail + self.sampled * sampled + self.draft * drafts

    def seconds(self, window: Window, batch: int = 1) -> float:
        return sum(self.parts(shape_of(window, batch)))

    def factor(self, chance: random.Random) -> float:
        """Return by how much noise and pauses lengthen a pass."""
        noise = math.exp(abs(chance.gauss(0, self.noise)))
        return noise * (10.0 if chance.random() < self.pauses else 1.0)

    def times(
        self, lookahead: int = 4, batch: int = 1, chance: random.Random | None = None
    ) -> PassTimes:
        """Return the times of probe passes, of three the least."""
        chance = chance or random.Random(0)
        seconds = {}
        for shape in (shape_of(window, batch) for window in probe_windows(lookahead, batch)):
            least = min(self.factor(chance) for _ in range(3))
            trunk, tail = self.parts(shape)
            seconds[shape] = (least * trunk, least * tail)
        return PassTimes(seconds)


HEAD = Machine(
    lambda rows: 1 + 0.25 * rows, adapter=0.8, lookahead=0.05, tail=0.1, sampled=0.05, draft=0.3
)
"""Of runtime/cpp/tests/parts_test.cpp, too."""


def timed(
    auto: Auto,
    sampler: Sampler,
    batch: int = 1,
    room: int = 1000,
    *,
    time_pass: Callable[[Batch], tuple[float, float]],
) -> Tuner | None:
    while untimed := auto.untimed(sampler, batch, room):
        for each in untimed:
            auto.timed(each, *time_pass(each))
    return auto.tuner(sampler, batch)


def tiled(base: float, tile: int, each: float) -> Callable[[int], float]:
    """each: the seconds of a tile."""
    return lambda rows: base + each * math.ceil(rows / tile)


def interpolated(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """seconds: by rows, with lines in between and beyond."""
    points, values = list(seconds), list(seconds.values())
    slope = (values[-1] - values[-2]) / (points[-1] - points[-2])
    return lambda rows: float(np.interp(rows, points, values)) + slope * max(0, rows - points[-1])


MACHINES = {
    "cheap rows on a CPU": Machine(
        interpolated({1: 10.4, 2: 11.7, 3: 12.6, 5: 14.7, 9: 18.9, 25: 33.4}),
        *(1.1, 0, 0.8, 0.5, 0.35),
    ),
    "dear rows on a CPU": Machine(
        interpolated({1: 9.7, 2: 12.0, 3: 13.7, 5: 17.3, 9: 25.3, 25: 54.3}),
        *(0.8, 0, 0.8, 0.5, 0.35),
    ),
    "a GPU": Machine(
        interpolated({1: 10.0, 16: 10.0, 17: 11.5, 32: 11.5, 33: 14.0, 64: 14.0}),
        *(0.6, 0, 0.5, 0.02, 0.3),
    ),
    "tiles of 8": Machine(tiled(8.0, 8, 2.0), 0.3, 0, 0.5, 0.1, 0.2),
    "expensive rows": Machine(lambda rows: 6 + 4.0 * rows, 0.3, 0, 0.5, 0.1, 0.2),
    "an expensive draft head": Machine(lambda rows: 9.7 + 0.3 * rows, 4.0, 0, 0.5, 0.1, 1.5),
    "cheap rows": Machine(lambda rows: 9.7 + 0.3 * rows, 0.3, 0, 0.5, 0.1, 0.1),
}


def decoding_seconds(
    machine: Machine,
    tuner: Tuner | None,
    rates: Sequence[float],
    tokens: int,
    seed: int = 1,
    change: Callable[[Window, float], float] = lambda window, share: 1.0,
    plan: Plan | None = None,
) -> float:
    """Return the seconds of `tokens` tokens in sequences of 150, with a tuner or a plan."""
    noise, draws, lookahead = random.Random(seed), random.Random(seed + 1), len(rates)
    seconds, written, sequence_end, staged_drafts = 0.0, 0, 0, 0
    staged_window, own = None, None
    while written < tokens:
        if tuner is not None:
            if own is None or written >= sequence_end:
                own, sequence_end = Rates(tuner.rates), written + 150
            plan = tuner.choose(lookahead, 1, [own]).plan
        assert plan is not None
        window = staged_window if staged_window in plan.windows else plan.windows[0]
        drafted = min(staged_drafts, window.drafts) if window == staged_window else 0
        accepted = next((i for i in range(drafted) if draws.random() >= rates[i]), drafted)
        pass_seconds = machine.seconds(window) * machine.factor(noise)
        pass_seconds *= change(window, written / tokens)
        seconds, written = seconds + pass_seconds, written + 1 + accepted
        staged_drafts, staged_window = window.next_drafts(accepted), window.next
        if tuner is not None:
            tuner.observe(window, 1, pass_seconds, [Verified(None, drafted, accepted, own)])
    return seconds * tokens / written  # the last pass may write more tokens than are wanted


def plain_seconds(machine: Machine, tokens: int, seed: int = 1, **options) -> float:
    plan = make_plan("ar", 0)
    return decoding_seconds(machine, None, [0.0], tokens, seed, plan=plan, **options)


def least_seconds(
    machine: Machine, rates: Sequence[float], tokens: int, seed: int = 1, **options
) -> float:
    """Return the seconds of the plan that is fastest on average."""
    plan = best_plan(machine, rates)
    return decoding_seconds(machine, None, rates, tokens, seed, plan=plan, **options)


def best_plan(machine: Machine, rates: Sequence[float]) -> Plan:
    cumulative = Acceptance(rates).cumulative
    by_rate = [(1 / machine.seconds(ar_window()), make_plan("ar", 0))]  # tokens per second, plan
    for drafts in range(1, len(rates) + 1):
        plan = make_plan("two-pass", drafts)
        tokens = 2 + float(cumulative[1 : drafts + 1].sum())  # of both passes together
        by_rate.append((tokens / sum(map(machine.seconds, plan.windows)), plan))

    def seconds(rows: int, drafts: int) -> float:
        return sum(machine.parts(PassShape(rows, 1 + drafts, drafts)))

    rate, groups = best_shape(cumulative, seconds)
    return max([*by_rate, (rate, fused_plan(groups))], key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class DraftsAt:
    """The drafts of a pass at a token of a text."""

    right_lookahead: int
    confidence: int = 0
    ngrams: int = 0
    right_ngrams: int = 0


def text_seconds(machine: Machine, tuner: Tuner, text: Sequence[DraftsAt]) -> float:
    verifying = (*map(verify_window, range(1, 5)), *map(copy_window, COPY_DRAFTS))
    capabilities = Capabilities("formula", 100, (4096,), (64, 1), verifying=verifying)
    rates, staged_window, staged_drafts = Rates(tuner.rates), None, 0
    written, seconds = 0, 0.0
    while written < len(text):
        root = text[written]
        ngrams = Drafts((7,) * root.ngrams, "ngram", root.confidence) if root.ngrams else None
        choice = tuner.choose(tuner.max_drafts, 1, [rates])
        situation = Situation(
            choice.plan, staged_window, 4000, capabilities, advice=(tuner, choice)
        )
        next_pass = situation.next_pass([Proposed(ngrams, staged_drafts, rates)])
        assert next_pass is not None
        window, (verified,) = next_pass
        drafted, accepted = 0, 0
        if verified is not None:
            drafted = len(verified.tokens)
            accepted = min(drafted, root.right_ngrams)
        elif staged_window == window and staged_drafts:
            # The look-ahead rows that made the drafts follow the token before the root.
            drafted = staged_drafts
            accepted = min(drafted, text[written - 1].right_lookahead)
        taken = machine.seconds(window)
        tuner.observe(window, 1, taken, [Verified(verified, drafted, accepted, rates)])
        seconds, written = seconds + taken, written + 1 + accepted
        staged_window, staged_drafts = window.next, window.next_drafts(accepted)
    return seconds * len(text) / written  # the last pass may write more than the text
