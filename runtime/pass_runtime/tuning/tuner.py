"""--plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import Cycle, Plan
from pass_runtime.tuning.acceptance import FORCED, ConditionalAcceptance, Floats, cumulative_of
from pass_runtime.tuning.menu import menu, tokens_of
from pass_runtime.tuning.pass_times import PassTimes, shape_of

EVERY = 12
"""The fewest passes between two decisions."""
BUDGET = 0.005
"""The share of decoding time that decisions may take."""
ADVANTAGE = 1.03
"""A cycle is taken up if its expected rate is at least this many times that of the present one. It is given up for
plain decoding if its expected rate is less than this many times that."""
IDLE_PASSES, TRIAL_PASSES = 2000, 4
"""A cycle none of whose passes is among the last IDLE_PASSES is tried for TRIAL_PASSES after a decision, if it promises
as much as the one in use; plain decoding, to which all are compared, whatever it promises."""
UNKNOWN = 0.1
"""The conditional acceptance of look-ahead drafts at first, where the bundle states none."""
NGRAM_PRIOR = 0.6
"""The conditional acceptance of n-gram drafts before any was tried."""
FORCED_PRIOR = 0.98
"""The same where a grammar leaves no choice."""
NGRAM_WEIGHT = 2.0
"""The number of passes that the rates of all sequences count for in those of one. Texts differ widely in what an n-gram
says of its next tokens: drafts that fail in one are given up after a few passes, however well they do in others."""


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
        self, times: PassTimes, lookahead: int, acceptance: Sequence[float], able: Capabilities | None = None
    ) -> None:
        """acceptance: the cumulative acceptance by position that the bundle states for this sampler (`LookaheadInfo`);
        empty if it states none. able: as for `menu`."""
        rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])]
        prior = [*rates, *[UNKNOWN] * lookahead][:lookahead]
        self.by_batch, self.lookahead, self._able = {1: times}, lookahead, able
        self.lookahead_drafts = ConditionalAcceptance(prior)
        self.ngrams: dict[int, ConditionalAcceptance] = {}
        [self.decided] = self.candidates(0)
        # By look-ahead and batch: what is decided, what is tried before, and after how many passes in all that ends.
        self._by_request: dict[tuple[int, int], tuple[Candidate, Candidate, int]] = {}
        self._ran: dict[tuple[Plan, int], int] = {}  # the number of its last pass
        self._passes, self._decided_at = 0, 0  # in all; when it decided last
        self._decoding, self._due = 0.0, 0.0  # seconds in all; before the next decision

    def times(self, batch: int = 1) -> PassTimes:
        """The times of passes over `batch` slots. A batch size that was not timed counts as one window with as many
        rows."""
        return self.by_batch.get(batch, self.by_batch[1])

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """The seconds of one pass over `plan`."""
        return self.times(batch).seconds(shape_of(plan, batch))

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """Note that a pass over `plan` took `seconds`."""
        self._passes += 1
        self._decoding += seconds
        self._ran[plan, batch] = self._passes
        self.times(batch).record(shape_of(plan, batch), seconds)

    def ngram(self, matched: int, own: dict[int, ConditionalAcceptance] | None = None) -> ConditionalAcceptance:
        """The acceptance of n-gram drafts after a match of `matched` tokens: that of a sequence, among its `own`, or
        that of all sequences."""
        if matched not in self.ngrams:
            prior = FORCED_PRIOR if matched == FORCED else NGRAM_PRIOR
            self.ngrams[matched] = ConditionalAcceptance([prior] * self.lookahead)
        if own is None:
            return self.ngrams[matched]
        if matched not in own:
            own[matched] = ConditionalAcceptance(self.ngrams[matched].rates, NGRAM_WEIGHT)
        return own[matched]

    def new_acceptance(self) -> ConditionalAcceptance:
        """The acceptance of a new sequence, which starts from that of all sequences."""
        return ConditionalAcceptance(self.lookahead_drafts.rates)

    def candidates(self, lookahead: int, batch: int = 1, cumulative: Floats | None = None) -> list[Candidate]:
        """The menu, with drafts at most `lookahead` deep and windows not wider than those that were timed; best first.

        cumulative: the mean cumulative acceptance of the sequences in the batch; None for that of all sequences so far.
        """
        cumulative = cumulative_of(self.lookahead_drafts.rates) if cumulative is None else cumulative
        widest = self.by_batch[1].rows[-1]
        found = []
        for cycle in menu(lookahead, self._able):
            if cycle.plans[0].width <= widest:
                seconds = sum(self.plan_seconds(plan, batch) for plan in cycle.plans) / len(cycle.plans)
                found.append(Candidate(cycle, tokens_of(cycle, cumulative), seconds))
        return sorted(found, key=lambda candidate: -candidate.rate)

    def mode(self, lookahead: int, batch: int, acceptances: Sequence[ConditionalAcceptance]) -> Candidate:
        """The candidate for the next pass. It is decided anew from time to time, and at once for a new look-ahead or
        batch size. Decisions take at most the share BUDGET of decoding time."""
        key, started = (lookahead, batch), time.perf_counter()
        self.decided, *_ = self._by_request.get(key, (self.decided,))
        rested = self._passes - self._decided_at >= EVERY and self._decoding >= self._due
        if key not in self._by_request or rested:
            decided = self.decide(lookahead, batch, acceptances)
            self._by_request[key] = decided, self._trial, self._passes + TRIAL_PASSES
            took = time.perf_counter() - started
            self._decided_at, self._due = self._passes, max(self._due, self._decoding) + took / BUDGET
        self.decided, trial, ends = self._by_request[key]
        return trial if self._passes < ends else self.decided

    def decide(self, lookahead: int, batch: int = 1, acceptances: Sequence[ConditionalAcceptance] = ()) -> Candidate:
        """The best candidate if it is clearly better than plain decoding and the present one, else one of those."""
        cumulative = None
        if acceptances:
            cumulative = np.mean([cumulative_of(acceptance.rates) for acceptance in acceptances], axis=0)
        candidates = self.candidates(lookahead, batch, cumulative)
        best, plain = candidates[0], next(c for c in candidates if not c.cycle.lookahead)
        present = next((c for c in candidates if c.cycle == self.decided.cycle), plain)
        if present.rate < ADVANTAGE * plain.rate:
            present = plain
        self.decided = best if best.rate >= ADVANTAGE * present.rate else present
        self._trial = self.decided
        for candidate in candidates if self._passes else []:
            last = self._ran.get((candidate.cycle.plans[0], batch), -IDLE_PASSES)
            promising = candidate is plain or candidate.rate >= self.decided.rate
            if promising and self._passes - last >= IDLE_PASSES:
                self._trial = candidate
                break
        self._ran[self._trial.cycle.plans[0], batch] = self._passes  # also if a request runs another in its place
        return self.decided
