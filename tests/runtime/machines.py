"""Machines whose pass times are formulas, for tests of what `auto` chooses: times to give to a
tuner, and simulated decoding, which runs no pass and adds up the seconds that passes would take."""

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


class FixedTimes(PassTimes):
    """Pass times that passes which are observed later do not change."""

    def record(self, shape: PassShape, seconds: float) -> None:
        pass


Tail = Callable[[int], float]


def times_by_rows(
    trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0, kind: type[PassTimes] = PassTimes
) -> PassTimes:
    """Return pass times in seconds: a trunk takes `trunk[rows]`, and a tail `tail(rows)`.
    Look-ahead rows cost as much as other rows, and a draft as much as a sampled row."""
    shapes = [
        shape
        for rows in trunk
        for shape in {PassShape(rows, rows, 0), PassShape(rows, 1, rows - 1)}
    ]
    return kind({shape: (trunk[shape.rows], tail(shape.rows)) for shape in shapes})


def fixed_times(trunk: Mapping[int, float], tail: Tail = lambda rows: 0.0) -> PassTimes:
    """Return the times of `times_by_rows` as times that observed passes do not change."""
    return times_by_rows(trunk, tail, FixedTimes)


FREE_ROWS = fixed_times({1: 1.0, 25: 1.0})
"""More rows take no more time."""
EXPENSIVE_ROWS = fixed_times({1: 1.0, 25: 25.0})
"""Every row takes as long as the first."""


@dataclass(frozen=True)
class Machine:
    """What the seconds of a pass are made of.

    trunk: for a number of rows. adapter: added in passes that have drafts. lookahead: for each row
    that is not sampled. tail: for each pass. sampled, draft: added to the tail for each sampled row
    and each draft. noise: the relative deviation of a pass. pauses: the share of passes that take
    ten times as long.
    """

    trunk: Callable[[int], float]
    adapter: float = 0.0
    lookahead: float = 0.0
    tail: float = 0.0
    sampled: float = 0.0
    draft: float = 0.0
    noise: float = 0.0
    pauses: float = 0.0

    def parts(self, shape: PassShape) -> tuple[float, float]:
        """Return the seconds of trunk and tail, without noise."""
        rows, sampled, drafts = shape
        trunk = self.trunk(rows) + (self.adapter + self.lookahead * (rows - sampled)) * (drafts > 0)
        return trunk, self.tail + self.sampled * sampled + self.draft * drafts

    def seconds(self, plan: Plan, batch: int = 1) -> float:
        """Return the seconds of a pass without noise."""
        return sum(self.parts(shape_of(plan, batch)))

    def factor(self, chance: random.Random) -> float:
        """Return the random factor, at least 1, by which noise and pauses lengthen a pass."""
        noise = math.exp(abs(chance.gauss(0, self.noise)))
        return noise * (10.0 if chance.random() < self.pauses else 1.0)

    def times(
        self, lookahead: int = 4, batch: int = 1, chance: random.Random | None = None
    ) -> PassTimes:
        """Return the times that this machine's probe passes give, of three passes the least."""
        chance = chance or random.Random(0)
        seconds = {}
        for shape in (shape_of(plan, batch) for plan in probe_plans(lookahead, batch)):
            least = min(self.factor(chance) for _ in range(3))
            trunk, tail = self.parts(shape)
            seconds[shape] = (least * trunk, least * tail)
        return PassTimes(seconds)


def tiled(base: float, tile: int, each: float) -> Callable[[int], float]:
    """Return a trunk that computes rows in tiles of `tile` rows, each of which takes `each`."""
    return lambda rows: base + each * math.ceil(rows / tile)


def interpolated(seconds: Mapping[int, float]) -> Callable[[int], float]:
    """Return a trunk that takes `seconds` for some numbers of rows, in between as long as a line
    through the next two points says, and beyond as long as a line through the last two."""
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
    change: Callable[[Plan, float], float] = lambda plan, share: 1.0,
    cycle: Cycle | None = None,
) -> float:
    """Return the seconds for `tokens` tokens in sequences of 150, which one of the two decodes: the
    mode `auto` with this tuner, or the cycle.

    rates[i]: how often draft i is accepted if all drafts before it are. change(plan, share): a
    factor on the seconds of a pass when this share of the tokens is written.
    """
    noise, draws, lookahead = random.Random(seed), random.Random(seed + 1), len(rates)
    seconds, written, sequence_end, staged_drafts = 0.0, 0, 0, 0
    staged_plan, acceptance = None, None
    while written < tokens:
        if tuner is not None:
            if acceptance is None or written >= sequence_end:
                acceptance, sequence_end = tuner.new_acceptance(), written + 150
            cycle = tuner.next_candidate(lookahead, 1, [acceptance]).cycle
        assert cycle is not None
        plan = staged_plan if staged_plan in cycle.plans else cycle.plans[0]
        drafted = min(staged_drafts, plan.drafts) if plan == staged_plan else 0
        accepted = next((i for i in range(drafted) if draws.random() >= rates[i]), drafted)
        pass_seconds = machine.seconds(plan) * machine.factor(noise)
        pass_seconds *= change(plan, written / tokens)
        seconds, written = seconds + pass_seconds, written + 1 + accepted
        staged_drafts, staged_plan = plan.next_draft_depth(accepted), plan.next
        if tuner is not None:
            tuner.observe(plan, 1, pass_seconds)
            for rates_so_far in (tuner.lookahead_acceptance, acceptance):
                assert rates_so_far is not None
                if drafted:
                    rates_so_far.record(drafted, accepted)
                elif not plan.groups:
                    rates_so_far.forget()
    return seconds * tokens / written  # the last pass may write more tokens than are wanted


def plain_seconds(machine: Machine, tokens: int, seed: int = 1, **options) -> float:
    """Return the seconds of plain decoding. options: of `decoding_seconds`."""
    cycle = make_cycle("ar", 0)
    return decoding_seconds(machine, None, [0.0], tokens, seed, cycle=cycle, **options)


def least_seconds(
    machine: Machine, rates: Sequence[float], tokens: int, seed: int = 1, **options
) -> float:
    """Return the seconds of the cycle that is fastest on average; `auto` cannot know beforehand
    which that is. options: of `decoding_seconds`."""
    cycle = best_cycle(machine, rates)
    return decoding_seconds(machine, None, rates, tokens, seed, cycle=cycle, **options)


def best_cycle(machine: Machine, rates: Sequence[float]) -> Cycle:
    """Return the fastest of all cycles at these rates, on the menu of `auto` or not."""
    cumulative = cumulative_acceptance(rates)
    by_rate = [(1 / machine.seconds(ar_plan()), make_cycle("ar", 0))]  # tokens per second, cycle
    for drafts in range(1, len(rates) + 1):
        cycle = make_cycle("two-pass", drafts)
        tokens = 2 + float(cumulative[1 : drafts + 1].sum())  # of both passes together
        by_rate.append((tokens / sum(map(machine.seconds, cycle.plans)), cycle))

    def seconds(rows: int, drafts: int) -> float:
        return sum(machine.parts(PassShape(rows, 1 + drafts, drafts)))

    rate, groups = best_shape(cumulative, seconds)
    return max([*by_rate, (rate, fused_cycle(groups))], key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class DraftsAt:
    """The drafts of a pass whose root is a certain token of a text: how many look-ahead drafts are
    right, the length of the n-gram match, and how many n-gram drafts it gives and are right."""

    right_lookahead: int
    match_length: int = 0
    ngrams: int = 0
    right_ngrams: int = 0


def text_seconds(machine: Machine, tuner: Tuner, text: Sequence[DraftsAt]) -> float:
    """Return the seconds in which `auto` writes a text, with n-gram drafts too."""
    capabilities = Capabilities("formula", 100, (4096,), (64, 1))
    acceptance = tuner.new_acceptance()
    drafts = tuner.max_drafts
    request = Request(
        (1, 2), SamplingParams(), len(text), "auto", None, drafts, drafts, frozenset()
    )
    slot, staged_plan = Slot(0, SequenceState(request)), None
    written, seconds = 0, 0.0
    while written < len(text):
        root = text[written]
        slot.ngram, slot.match_length = (7,) * root.ngrams, root.match_length
        candidate = tuner.next_candidate(tuner.max_drafts, 1, [acceptance])
        policy = ExpectedRate(tuner, candidate, 1)
        situation = Situation(candidate.cycle, staged_plan, 4000, capabilities, [slot], policy)
        next_pass = situation.next_pass()
        assert next_pass is not None
        plan, (ngram,) = next_pass
        tuner.observe(plan, 1, machine.seconds(plan))
        accepted = 0
        if ngram is not None:
            accepted = min(len(ngram), root.right_ngrams)
            for of_sequence in (slot.current.ngram_acceptance, None):
                tuner.ngram(root.match_length, of_sequence).record(len(ngram), accepted)
        elif staged_plan == plan and slot.num_drafts:
            # The look-ahead rows that made the drafts follow the token before the root.
            accepted = min(slot.num_drafts, text[written - 1].right_lookahead)
            for rates in (tuner.lookahead_acceptance, acceptance):
                rates.record(slot.num_drafts, accepted)
        elif not plan.groups:
            tuner.lookahead_acceptance.forget()
            acceptance.forget()
        seconds, written = seconds + machine.seconds(plan), written + 1 + accepted
        staged_plan, slot.num_drafts = plan.next, plan.next_draft_depth(accepted)
    return seconds * len(text) / written  # the last pass may write more than the text
