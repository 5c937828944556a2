"""--plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle
from pass_runtime.tuning.acceptance import ConditionalAcceptance
from pass_runtime.tuning.group_sizes import Floats, best_shape, cumulative_of, full_shape, shapes, two_pass_tokens
from pass_runtime.tuning.pass_times import PassTimes

EVERY = 12
"""The fewest passes between two decisions."""
BUDGET = 0.01
"""The share of decoding time that decisions may take."""
ADVANTAGE = 1.10
"""A plan is taken up where its expected rate is at least this many times that of plain decoding and of the present
plan, since expectations rest on estimated times and on the acceptance of other texts."""
KEEP = 1.03
"""A plan is given up for plain decoding where its expected rate is less than this many times that of plain decoding."""
UNKNOWN = 0.1
"""The conditional acceptance of look-ahead drafts at first, where the bundle states none."""
NGRAM_PRIOR = 0.6
"""The conditional acceptance of n-gram drafts before any was tried."""


@dataclass(frozen=True)
class Candidate:
    """A cycle of plans, with its expected tokens and seconds per pass, for each sequence of a batch."""

    cycle: Cycle
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second and sequence."""
        return self.tokens / self.seconds


class PlanTuner:
    """Pass times and acceptance of drafts for one sampler. All requests of a session with that sampler share it."""

    def __init__(
        self,
        times: PassTimes,
        lookahead: int,
        acceptance: Sequence[float],
        *,
        exactly: int | None = None,
        follow: bool = False,
    ) -> None:
        """acceptance: the cumulative acceptance by position that the bundle states for this sampler (`LookaheadInfo`);
        empty where it states none.

        exactly: the only number of drafts that engines have plans for, with full groups (`Capabilities.lookahead`).
        follow: whether the times of later passes correct `times`.
        """
        rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])]
        prior = [*rates, *[UNKNOWN] * lookahead][:lookahead]
        self.times, self.lookahead, self._exactly = times, lookahead, exactly
        self.lookahead_drafts = ConditionalAcceptance(prior)
        self.ngrams: dict[int, ConditionalAcceptance] = {}
        self.decided = Candidate(make_cycle("ar", 0), 1.0, times.seconds(1, 1))
        self._follow = follow
        self.slower: dict[int, float] = {}
        """By rows of a pass, of all slots together: a running average of measured time / `times`."""
        self._by_request: dict[tuple[int, int], Candidate] = {}  # by look-ahead and batch
        self._passes, self._debt = 0, 0.0

    @property
    def chosen(self) -> Cycle:
        """The cycle in use."""
        return self.decided.cycle

    def seconds(self, width: int, targets: int, drafts: int, batch: int = 1) -> float:
        """The seconds of one pass, corrected by the passes observed since they were timed."""
        return self._slower_at(batch * width) * self.times.seconds(width, targets, drafts, batch)

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """The seconds of one pass over `plan`, corrected likewise."""
        return self._slower_at(batch * plan.width) * self.times.plan_seconds(plan, batch)

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """Record that a pass over `plan` took `seconds`. The corrections of other widths follow slowly, since a busier
        machine or a longer text slows passes of every width."""
        self._passes += 1
        self._debt -= BUDGET * seconds
        if not self._follow:
            return
        ratio, rows = seconds / self.times.plan_seconds(plan, batch), batch * plan.width
        self.slower.setdefault(rows, self._slower_at(rows))
        for width, slower in self.slower.items():  # a ratio is bounded: a pause says nothing about a pass
            share = 1 / 8 if width == rows else 1 / 64
            self.slower[width] += (min(ratio, 1.5 * slower) - slower) * share

    def _slower_at(self, rows: int) -> float:
        known = sorted(self.slower)
        return float(np.interp(rows, known, [self.slower[w] for w in known])) if known else 1.0

    def ngram(self, matched: int) -> ConditionalAcceptance:
        """The acceptance of n-gram drafts after a match of `matched` tokens."""
        return self.ngrams.setdefault(matched, ConditionalAcceptance([NGRAM_PRIOR] * self.lookahead))

    def new_acceptance(self) -> ConditionalAcceptance:
        """The acceptance of a new sequence, which starts from that of all sequences."""
        return ConditionalAcceptance(self.lookahead_drafts.rates)

    def candidates(self, lookahead: int, batch: int = 1, cumulative: Floats | None = None) -> list[Candidate]:
        """Plain decoding, the best two-pass cycle and the best fused plan with at most `lookahead` drafts; best first.

        cumulative: the mean cumulative acceptance of the sequences in the batch; None for that of all sequences so far.
        """
        cumulative = cumulative_of(self.lookahead_drafts.rates) if cumulative is None else cumulative
        cumulative = cumulative[: lookahead + 1]
        found = [self._candidate(make_cycle("ar", 0), 1.0, batch)]
        lengths = range(1, lookahead + 1) if self._exactly is None else [self._exactly] * (lookahead >= self._exactly)
        pairs = [make_cycle("two-pass", length) for length in lengths]
        two_pass = [self._candidate(pair, two_pass_tokens(pair.lookahead, cumulative), batch) for pair in pairs]
        found += [max(two_pass, key=lambda candidate: candidate.rate)] if two_pass else []
        shape = best_shape(
            cumulative,
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

    def mode(self, lookahead: int, batch: int, acceptances: Sequence[ConditionalAcceptance]) -> Candidate:
        """The candidate for the next pass. It is decided anew from time to time, and at once for a new look-ahead or
        batch size.

        Decisions take at most the share BUDGET of decoding time, since an enumeration of shapes takes milliseconds.
        """
        key, started = (lookahead, batch), time.perf_counter()
        self.decided = self._by_request.get(key, self.decided)
        if key not in self._by_request or (self._passes >= EVERY and self._debt <= 0):
            self._by_request[key] = self.decide(lookahead, batch, acceptances)
            self._passes, self._debt = 0, max(self._debt, 0.0) + time.perf_counter() - started
        return self.decided

    def decide(self, lookahead: int, batch: int = 1, acceptances: Sequence[ConditionalAcceptance] = ()) -> Candidate:
        """The best candidate where it is clearly better than plain decoding and the present one, else one of those."""
        cumulative = None
        if acceptances:
            cumulative = np.mean([cumulative_of(acceptance.rates) for acceptance in acceptances], axis=0)
        candidates = self.candidates(lookahead, batch, cumulative)
        best, plain = candidates[0], next(c for c in candidates if c.cycle.lookahead == 0)
        present = next((c for c in candidates if c.cycle == self.chosen), None)
        if present is None:  # the present plan has another shape or look-ahead: compare its kind
            present = next((c for c in candidates if c.cycle.plans[0].is_fused == self.chosen.plans[0].is_fused), best)
        if present is plain or present.rate < KEEP * plain.rate:
            self.decided = best if best.rate >= ADVANTAGE * plain.rate else plain
        else:
            self.decided = best if best.rate >= ADVANTAGE * present.rate else present
        return self.decided
