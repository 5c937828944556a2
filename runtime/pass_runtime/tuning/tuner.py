"""--plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle
from pass_runtime.tuning.acceptance import Acceptance
from pass_runtime.tuning.group_sizes import Floats, best_shape, chain_of, full_shape, shapes, two_pass_tokens
from pass_runtime.tuning.pass_times import PassTimes

EVERY = 12
"""Passes between two decisions, at least."""
BUDGET = 0.01
"""The part of decoding time that decisions may take."""
ADVANTAGE = 1.10
"""A plan must promise this much more than plain decoding, and than the present plan, to be taken up: promises rest on
measured times and on acceptance elsewhere."""
KEEP = 1.03
"""A plan that promises less than this against plain decoding is given up for it."""
UNKNOWN = 0.1
"""Acceptance rate of drafts that nobody has measured."""
TEXT_PRIOR = 0.6
"""Acceptance rate of drafts from the text, before any was tried."""


@dataclass(frozen=True)
class Candidate:
    """A mode with what it is expected to do for each sequence of a batch."""

    cycle: Cycle
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second and sequence."""
        return self.tokens / self.seconds


class PlanTuner:
    """What one session knows: pass times, and how well drafts do. Requests share it."""

    def __init__(
        self,
        times: PassTimes,
        lookahead: int,
        acceptance: Sequence[float],
        *,
        exactly: int | None = None,
        follow: bool = False,
    ) -> None:
        """acceptance: by position, for the kind of decoding at hand (see `LookaheadInfo`); empty where it is not known.

        exactly: the only look-ahead that there are plans for, with full groups (see `Capabilities.lookahead`).
        follow: whether `times` change with what passes turn out to take.
        """
        rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])]
        prior = [*rates, *[UNKNOWN] * lookahead][:lookahead]
        self.times, self.lookahead, self._exactly = times, lookahead, exactly
        self.drafts = Acceptance(prior)
        self.texts: dict[int, Acceptance] = {}
        self.decided = Candidate(make_cycle("ar", 0), 1.0, times.seconds(1, 1))
        self._follow = follow
        self.slower: dict[int, float] = {}
        """By rows of a pass, of all slots together: how much longer passes take than `times` say, a running average."""
        self._by_request: dict[tuple[int, int], Candidate] = {}  # by look-ahead and batch
        self._passes, self._debt = 0, 0.0

    @property
    def chosen(self) -> Cycle:
        """The mode in use."""
        return self.decided.cycle

    def seconds(self, width: int, targets: int, drafts: int, batch: int = 1) -> float:
        """Of one pass: as measured, and corrected by the passes since."""
        return self._slower_at(batch * width) * self.times.seconds(width, targets, drafts, batch)

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """Of one pass over `plan`."""
        return self._slower_at(batch * plan.width) * self.times.plan_seconds(plan, batch)

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """A pass over `plan` took so long. Passes that are not in use drift along: whatever slows a machine, and a
        longer text, slows them all."""
        self._passes += 1
        self._debt -= BUDGET * seconds
        if not self._follow:
            return
        ratio, rows = seconds / self.times.plan_seconds(plan, batch), batch * plan.width
        self.slower.setdefault(rows, self._slower_at(rows))
        for width, slower in self.slower.items():
            share = 1 / 8 if width == rows else 1 / 64
            self.slower[width] += (min(ratio, 1.5 * slower) - slower) * share  # a pause says nothing about a pass

    def _slower_at(self, rows: int) -> float:
        known = sorted(self.slower)
        return float(np.interp(rows, known, [self.slower[w] for w in known])) if known else 1.0

    def text(self, matched: int) -> Acceptance:
        """The acceptance of text drafts behind a match of `matched` tokens."""
        return self.texts.setdefault(matched, Acceptance([TEXT_PRIOR] * self.lookahead))

    def new_acceptance(self) -> Acceptance:
        """Of one sequence: what is known of all of them, to begin with."""
        return Acceptance(self.drafts.rates)

    def candidates(self, lookahead: int, batch: int = 1, chain: Floats | None = None) -> list[Candidate]:
        """The best of each mode with at most `lookahead` drafts, `ar` included; best first.

        chain: of the sequences in the batch on average (see `group_sizes`); None for what is known of all sequences.
        """
        chain = chain_of(self.drafts.rates) if chain is None else chain
        chain = chain[: lookahead + 1]
        found = [self._candidate(make_cycle("ar", 0), 1.0, batch)]
        lengths = range(1, lookahead + 1) if self._exactly is None else [self._exactly] * (lookahead >= self._exactly)
        pairs = [make_cycle("two-pass", length) for length in lengths]
        two_pass = [self._candidate(pair, two_pass_tokens(pair.lookahead, chain), batch) for pair in pairs]
        found += [max(two_pass, key=lambda candidate: candidate.rate)] if two_pass else []
        shape = best_shape(
            chain,
            lambda width, drafts: self.seconds(width, 1 + drafts, drafts, batch),
            self.times.max_width,
            shapes if self._exactly is None else lambda drafts: full_shape(drafts)[: drafts == self._exactly],
        )
        if shape is not None:
            found.append(Candidate(fused_cycle(shape.groups), shape.tokens, shape.seconds))
        return sorted(found, key=lambda candidate: -candidate.rate)

    def _candidate(self, cycle: Cycle, tokens: float, batch: int) -> Candidate:
        seconds = [self.plan_seconds(plan, batch) for plan in cycle.plans]
        return Candidate(cycle, tokens, sum(seconds) / len(seconds))

    def mode(self, lookahead: int, batch: int, acceptances: Sequence[Acceptance]) -> Candidate:
        """The mode for the next pass: decided anew from time to time, and where nobody has asked for this before.

        Decisions take at most BUDGET of the time that passes take: an enumeration of shapes costs milliseconds.
        """
        asked, started = (lookahead, batch), time.perf_counter()
        self.decided = self._by_request.get(asked, self.decided)
        if asked not in self._by_request or (self._passes >= EVERY and self._debt <= 0):
            self._by_request[asked] = self.decide(lookahead, batch, acceptances)
            self._passes, self._debt = 0, max(self._debt, 0.0) + time.perf_counter() - started
        return self.decided

    def decide(self, lookahead: int, batch: int = 1, acceptances: Sequence[Acceptance] = ()) -> Candidate:
        """The best candidate that is clearly better than plain decoding and than the present choice."""
        chain = None
        if acceptances:
            chain = np.mean([chain_of(acceptance.rates) for acceptance in acceptances], axis=0)
        candidates = self.candidates(lookahead, batch, chain)
        best, plain = candidates[0], next(c for c in candidates if c.cycle.lookahead == 0)
        present = next((c for c in candidates if c.cycle == self.chosen), None)
        if present is None:  # a fused plan of another shape, or one of another request's look-ahead
            present = next((c for c in candidates if c.cycle.plans[0].is_fused == self.chosen.plans[0].is_fused), best)
        if present is plain or present.rate < KEEP * plain.rate:
            self.decided = best if best.rate >= ADVANTAGE * plain.rate else plain
        else:
            self.decided = best if best.rate >= ADVANTAGE * present.rate else present
        return self.decided
