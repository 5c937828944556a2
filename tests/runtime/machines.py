"""Machines as formulas: pass times to decide by, and passes that take as long as a formula says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from best_shapes import best_shape

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import Cycle, Plan, ar_plan, fused_cycle, make_cycle
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.decode.draft_policy import ExpectedRate, Situation
from pass_runtime.decode.sequence import Request, SequenceState, Slot
from pass_runtime.tuning.estimates import (
    PassShape,
    PassTimes,
    cumulative_acceptance,
    probe_plans,
    shape_of,
)
from pass_runtime.tuning.tuner import Tuner


class Given(PassTimes):
    """Pass times that no later pass corrects."""

    def record(self, shape: PassShape, seconds: float) -> None:
        pass


Tail = Callable[[int], float]


def timed(
    trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0, kind: type[PassTimes] = PassTimes
) -> PassTimes:
    """Times of a trunk by rows and a tail by sampled rows, in seconds. Look-ahead rows cost as much
    as other rows, and a draft as much as a sampled row."""
    shapes = [
        shape
        for rows in trunk
        for shape in {PassShape(rows, rows, 0), PassShape(rows, 1, rows - 1)}
    ]
    return kind({shape: (trunk[shape.rows], tail(shape.rows)) for shape in shapes})


def times_of(trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0) -> PassTimes:
    """Times as of `timed`, which no later pass corrects."""
    return timed(trunk, tail, Given)


FREE = times_of({1: 1.0, 25: 1.0})
DEAR = times_of({1: 1.0, 25: 25.0})


@dataclass(frozen=True)
class Machine:
    """The seconds of a pass: of the trunk by rows, of adapter and look-ahead rows, of the tail by
    sampled rows and drafts. noise: the relative deviation of a pass. pauses: the share of passes
    that take ten times as long."""

    trunk: Callable[[int], float]
    adapter: float = 0.0
    lookahead: float = 0.0
    tail: float = 0.0
    sampled: float = 0.0
    draft: float = 0.0
    noise: float = 0.0
    pauses: float = 0.0

    def parts(self, shape: PassShape) -> tuple[float, float]:
        """Seconds of trunk and tail without noise."""
        rows, sampled, drafts = shape
        trunk = self.trunk(rows) + (self.adapter + self.lookahead * (rows - sampled)) * (drafts > 0)
        return trunk, self.tail + self.sampled * sampled + self.draft * drafts

    def seconds(self, plan: Plan, batch: int = 1) -> float:
        return sum(self.parts(shape_of(plan, batch)))

    def factor(self, chance: random.Random) -> float:
        noise = math.exp(abs(chance.gauss(0, self.noise)))
        return noise * (10.0 if chance.random() < self.pauses else 1.0)

    def times(
        self, lookahead: int = 4, batch: int = 1, chance: random.Random | None = None
    ) -> PassTimes:
        """The times that this machine's probe passes give."""
        chance = chance or random.Random(0)
        seconds = {}
        for shape in (shape_of(plan, batch) for plan in probe_plans(lookahead, batch)):
            least = min(self.factor(chance) for _ in range(3))
            trunk, tail = self.parts(shape)
            seconds[shape] = (least * trunk, least * tail)
        return PassTimes(seconds)


def steps(base: float, tile: int, each: float) -> Callable[[int], float]:
    """Rows are computed in tiles."""
    return lambda rows: base + each * math.ceil(rows / tile)


def points(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Interpolate between the points, and extrapolate with the last two."""
    rows, values = list(seconds), list(seconds.values())
    slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2])
    return lambda at: float(np.interp(at, rows, values)) + slope * max(0, at - rows[-1])


MACHINES = {
    "w8a8 on a CPU": Machine(
        points({1: 10.4, 2: 11.7, 3: 12.6, 5: 14.7, 9: 18.9, 25: 33.4}), 1.1, 0, 0.8, 0.5, 0.35
    ),
    "int4 on a CPU": Machine(
        points({1: 9.7, 2: 12.0, 3: 13.7, 5: 17.3, 9: 25.3, 25: 54.3}), 0.8, 0, 0.8, 0.5, 0.35
    ),
    "a GPU": Machine(
        points({1: 10.0, 16: 10.0, 17: 11.5, 32: 11.5, 33: 14.0, 64: 14.0}), 0.6, 0, 0.5, 0.02, 0.3
    ),
    "tiles of 8": Machine(steps(8.0, 8, 2.0), 0.3, 0, 0.5, 0.1, 0.2),
    "dear rows": Machine(lambda rows: 6 + 4.0 * rows, 0.3, 0, 0.5, 0.1, 0.2),
    "a dear head": Machine(lambda rows: 9.7 + 0.3 * rows, 4.0, 0, 0.5, 0.1, 1.5),
    "cheap rows": Machine(lambda rows: 9.7 + 0.3 * rows, 0.3, 0, 0.5, 0.1, 0.1),
}


def decode(
    machine: Machine,
    tuner: Tuner | None,
    rates: Sequence[float],
    tokens: int,
    seed: int = 1,
    change: Callable[[Plan, float], float] = lambda plan, share: 1.0,
    cycle: Cycle | None = None,
) -> float:
    """Seconds for `tokens` tokens in sequences of 150, by a tuner (`auto`) or a given cycle. Drafts
    are accepted at these conditional rates. change(plan, share): a factor on the seconds of a pass
    when this share of the tokens is written."""
    chance, drawn, lookahead = random.Random(seed), random.Random(seed + 1), len(rates)
    seconds, written, ends, left = 0.0, 0, 0, 0
    window, acceptance = None, None
    while written < tokens:
        if tuner is not None:
            if acceptance is None or written >= ends:
                acceptance, ends = tuner.new_acceptance(), written + 150
            cycle = tuner.next_candidate(lookahead, 1, [acceptance]).cycle
        assert cycle is not None
        plan = window if window in cycle.plans else cycle.plans[0]
        drafted = min(left, plan.drafts) if plan == window else 0
        accepted = next((i for i in range(drafted) if drawn.random() >= rates[i]), drafted)
        took = machine.seconds(plan) * machine.factor(chance) * change(plan, written / tokens)
        seconds, written = seconds + took, written + 1 + accepted
        left, window = plan.next_draft_depth(accepted), plan.next
        if tuner is not None:
            tuner.observe(plan, 1, took)
            for counted in (tuner.lookahead_acceptance, acceptance):
                assert counted is not None
                if drafted:
                    counted.record(drafted, accepted)
                elif not plan.groups:
                    counted.forget()
    return seconds * tokens / written


def plainly(machine: Machine, tokens: int, seed: int = 1, **more) -> float:
    """The seconds of plain decoding."""
    return decode(machine, None, [0.0], tokens, seed, cycle=make_cycle("ar", 0), **more)


def fastest(machine: Machine, rates: Sequence[float], tokens: int, seed: int = 1, **more) -> float:
    """The seconds of the cycle that is fastest on average, which `auto` cannot know beforehand."""
    return decode(machine, None, rates, tokens, seed, cycle=best_cycle(machine, rates), **more)


def best_cycle(machine: Machine, rates: Sequence[float]) -> Cycle:
    """The fastest of all cycles at these conditional acceptance rates: no menu, no estimates."""
    cumulative = cumulative_acceptance(rates)
    found = [(1 / machine.seconds(ar_plan()), make_cycle("ar", 0))]
    for drafts in range(1, len(rates) + 1):
        cycle = make_cycle("two-pass", drafts)
        tokens = 1 + float(cumulative[1 : drafts + 1].sum()) / 2
        found.append((2 * tokens / sum(map(machine.seconds, cycle.plans)), cycle))

    def seconds(width: int, drafts: int) -> float:
        return sum(machine.parts(PassShape(width, 1 + drafts, drafts)))

    rate, groups = best_shape(cumulative, seconds)
    return max([*found, (rate, fused_cycle(groups))], key=lambda one: one[0])[1]


@dataclass(frozen=True)
class Place:
    """What drafts are worth where one token of a text is the root: `lookahead` look-ahead drafts
    are right, and `survive` of `drafts` n-gram drafts, which follow an n-gram
    of `match_length` tokens."""

    lookahead: int
    match_length: int = 0
    drafts: int = 0
    survive: int = 0


def replay(machine: Machine, tuner: Tuner, text: Sequence[Place]) -> float:
    """Seconds for a text by `auto`, n-gram drafts included."""
    able, acceptance = Capabilities("formula", 100, (4096,), (64, 1)), tuner.new_acceptance()
    drafts = tuner.max_drafts
    request = Request(
        (1, 2), SamplingParams(), len(text), "auto", None, drafts, drafts, frozenset()
    )
    slot, window, at, seconds = Slot(0, SequenceState(request)), None, 0, 0.0
    while at < len(text):
        place = text[at]
        slot.ngram, slot.match_length = (7,) * place.drafts, place.match_length
        decided = tuner.next_candidate(tuner.max_drafts, 1, [acceptance])
        policy = ExpectedRate(tuner, decided, 1)
        found = Situation(decided.cycle, window, 4000, able, [slot], policy).next_pass()
        assert found is not None
        plan, (ngram,) = found
        took = machine.seconds(plan)
        tuner.observe(plan, 1, took)
        accepted = 0
        if ngram is not None:
            accepted = min(len(ngram), place.survive)
            for own in (slot.current.ngram_acceptance, None):
                tuner.ngram(place.match_length, own).record(len(ngram), accepted)
        elif window == plan and slot.num_drafts:
            accepted = min(slot.num_drafts, text[at - 1].lookahead)
            for counted in (tuner.lookahead_acceptance, acceptance):
                counted.record(slot.num_drafts, accepted)
        elif not plan.groups:
            tuner.lookahead_acceptance.forget()
            acceptance.forget()
        seconds, at, window = seconds + took, at + 1 + accepted, plan.next
        slot.num_drafts = plan.next_draft_depth(accepted)
    return seconds * len(text) / at
