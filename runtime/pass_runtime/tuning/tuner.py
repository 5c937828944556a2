"""--plan auto: the plan with the most expected tokens per second, from measured passes and observed acceptance."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pass_runtime.bundle.plan import Cycle, Plan, ar_plan, fused_cycle, make_cycle, tree_cycle
from pass_runtime.bundle.tree import tree_depth
from pass_runtime.tuning.acceptance import FORCED, ConditionalAcceptance
from pass_runtime.tuning.group_sizes import (
    Floats,
    best_shape,
    conditional_of,
    cumulative_of,
    full_shape,
    shapes,
    two_pass_tokens,
)
from pass_runtime.tuning.pass_times import PassShape, PassTimes, shape_of
from pass_runtime.tuning.tree_groups import best_tree

EVERY = 12
"""The fewest passes between two decisions."""
MOST_NOTED = 64
"""The most passes that a decision learns from: the newest."""
BUDGET = 0.005
"""The share of decoding time that decisions may take."""
ADVANTAGE = 1.03
"""A plan is taken up where its expected rate, less what is in doubt, is at least this many times that of the present
plan. It is given up for plain decoding where its expected rate is less than this many times that."""
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
    """A cycle of plans, with its expected tokens and seconds per pass, for each sequence of a batch.

    doubt: by what share its passes may take longer than expected, compared with plain ones (`PassTimes.doubt`)."""

    cycle: Cycle
    tokens: float
    seconds: float
    doubt: float

    @property
    def rate(self) -> float:
        """Expected tokens per second and sequence."""
        return self.tokens / self.seconds

    @property
    def kind(self) -> tuple[int, bool, bool]:
        """Tells plain decoding, two passes, a fused one and a tree apart."""
        return len(self.cycle.plans), self.cycle.plans[0].is_fused, self.cycle.is_tree

    @property
    def sure_rate(self) -> float:
        """The rate if passes take as much longer as they may."""
        return self.rate / (1.0 + self.doubt)


class PlanTuner:
    """Pass times and acceptance of drafts for one sampler. All requests of a session with that sampler share it."""

    def __init__(
        self,
        times: PassTimes,
        lookahead: int,
        acceptance: Sequence[float],
        exactly: int | None = None,
        trees: Sequence[int] = (),
    ) -> None:
        """acceptance: the cumulative acceptance by position that the bundle states for this sampler (`LookaheadInfo`);
        empty where it states none.

        exactly: the only number of drafts that engines have plans for, with full groups (`Capabilities.lookahead`).
        trees: the sizes of the trees of drafts that there are.
        """
        rates = [after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])]
        prior = [*rates, *[UNKNOWN] * lookahead][:lookahead]
        self.by_batch, self.lookahead, self._exactly, self._trees = {1: times}, lookahead, exactly, trees
        self.lookahead_drafts = ConditionalAcceptance(prior)
        self.ngrams: dict[int, ConditionalAcceptance] = {}
        self.decided = self._candidate(make_cycle("ar", 0), 1.0, 1)
        self._by_request: dict[tuple[int, int], Candidate] = {}  # by look-ahead and batch
        self._passes, self._decoding, self._due = 0, 0.0, 0.0  # since the last decision; in all; before the next one
        self._observed: deque[tuple[int, PassShape, float]] = deque(maxlen=MOST_NOTED)

    @property
    def chosen(self) -> Cycle:
        """The cycle in use."""
        return self.decided.cycle

    def times(self, batch: int = 1) -> PassTimes:
        """The times of passes over `batch` slots. A batch size that was not timed counts as one window with as many
        rows."""
        return self.by_batch.get(batch, self.by_batch[1])

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """The seconds of one pass over `plan`."""
        return self.times(batch).seconds(shape_of(plan, batch))

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """Note that a pass over `plan` took `seconds`. The next decision learns from it: between two passes, with cold
        caches, the arithmetic takes several times as long as for a dozen of them in a row."""
        self._passes += 1
        self._decoding += seconds
        self._observed.append((batch, shape_of(plan, batch), seconds))

    def _learn(self) -> None:
        for batch, shape, seconds in self._observed:
            self.times(batch).record(shape, seconds)
        self._observed.clear()

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

    def candidates(
        self, lookahead: int, batch: int = 1, cumulative: Floats | None = None, *, faster: bool = False
    ) -> list[Candidate]:
        """Plain decoding, the best two-pass cycle, and the best fused plan and tree that are at most `lookahead` drafts
        deep; best first.

        cumulative: the mean cumulative acceptance of the sequences in the batch; None for that of all sequences so far.
        faster: a fused plan or tree that is not clearly faster than plain decoding is left out.
        """
        self._learn()
        cumulative = cumulative_of(self.lookahead_drafts.rates) if cumulative is None else cumulative
        cumulative = cumulative[: lookahead + 1]
        times, found = self.times(batch), [self._candidate(make_cycle("ar", 0), 1.0, batch)]
        lengths = range(1, lookahead + 1) if self._exactly is None else [self._exactly] * (lookahead >= self._exactly)
        pairs = [make_cycle("two-pass", length) for length in lengths]
        two_pass = [self._candidate(pair, two_pass_tokens(pair.lookahead, cumulative), batch) for pair in pairs]
        found += [max(two_pass, key=lambda candidate: candidate.rate)] if two_pass else []
        least, widest = ADVANTAGE * found[0].rate if faster else 0.0, self.by_batch[1].rows[-1]

        def seconds(width: int, drafts: int) -> float:
            return times.seconds(PassShape(batch * width, batch * (1 + drafts), batch * drafts))

        choices = shapes if self._exactly is None else lambda drafts: full_shape(drafts)[: drafts == self._exactly]
        if (shape := best_shape(cumulative, seconds, widest, choices, least)) is not None:
            found.append(self._candidate(fused_cycle(shape.groups), shape.tokens, batch))
        sizes = [size for size in self._trees if tree_depth(size) <= lookahead]
        rates, full = conditional_of(cumulative), self._exactly is not None
        if (tree := best_tree(sizes, lookahead, rates, seconds, widest, least, full=full)) is not None:
            found.append(self._candidate(tree_cycle(tree.groups, lookahead), tree.tokens, batch))
        return sorted(found, key=lambda candidate: -candidate.rate)

    def _candidate(self, cycle: Cycle, tokens: float, batch: int) -> Candidate:
        times, shapes = self.times(batch), [shape_of(plan, batch) for plan in cycle.plans]
        seconds = sum(map(times.seconds, shapes)) / len(shapes)
        doubt = times.doubt(shapes, shape_of(ar_plan(), batch)) if cycle.lookahead else 0.0
        return Candidate(cycle, tokens, seconds, doubt)

    def mode(self, lookahead: int, batch: int, acceptances: Sequence[ConditionalAcceptance]) -> Candidate:
        """The candidate for the next pass. It is decided anew from time to time, and at once for a new look-ahead or
        batch size.

        Decisions take at most the share BUDGET of decoding time, since an enumeration of shapes takes milliseconds.
        """
        key, started = (lookahead, batch), time.perf_counter()
        self.decided = self._by_request.get(key, self.decided)
        if key not in self._by_request or (self._passes >= EVERY and self._decoding >= self._due):
            self._by_request[key] = self.decide(lookahead, batch, acceptances)
            took = time.perf_counter() - started
            self._passes, self._due = 0, max(self._due, self._decoding) + took / BUDGET
        return self.decided

    def decide(self, lookahead: int, batch: int = 1, acceptances: Sequence[ConditionalAcceptance] = ()) -> Candidate:
        """The best candidate where it is clearly better than plain decoding and the present one, else one of those."""
        cumulative = None
        if acceptances:
            cumulative = np.mean([cumulative_of(acceptance.rates) for acceptance in acceptances], axis=0)
        candidates = self.candidates(lookahead, batch, cumulative, faster=True)
        plain = next(c for c in candidates if c.cycle.lookahead == 0)
        # The sizes of the present plan may be others by now.
        present = next((c for c in candidates if c.kind == self.decided.kind), plain)
        if present.rate < ADVANTAGE * plain.rate:
            present = plain
        best = max(candidates, key=lambda c: c.sure_rate)
        self.decided = best if best.sure_rate >= ADVANTAGE * present.sure_rate else present
        return self.decided
