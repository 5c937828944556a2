"""The mode `auto`: choose the cycle with the most expected tokens per second, by the measured times
of passes and the acceptance of drafts so far.

`menu` lists the cycles, and `expected_tokens` says what their passes write. A session has a tuner
for each sampler, as the tails differ by sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import Capabilities, PassKind
from pass_runtime.bundle.manifest import LookaheadInfo, Manifest
from pass_runtime.bundle.plan import Cycle, Plan, fused_cycle, make_cycle, tree_cycle
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.tree import tree_depth, tree_nodes
from pass_runtime.tuning.estimates import (
    FORCED_MATCH,
    TILE_GROUPS,
    ConditionalAcceptance,
    Floats,
    PassTimes,
    cumulative_acceptance,
    measure,
    probe_plans,
    shape_of,
)

DRAFT_COUNTS = (1, 2, 3, 4, 6)
"""The numbers of drafts of two-pass and fused plans in the menu, beside all L drafts."""
LATER_CHOICE_SHARES = (0.30, 0.12, 0.07, 0.048, 0.036)
"""The probability that the second, third, ... likeliest token is right if the likeliest is wrong.
Measured with SmolLM2-135M: means over depths 1 and 2, greedy and at temperature 0.8 (0.23 to 0.37
for the second)."""
AFTER_LATER_RATIO = 0.75
"""The acceptance of a first choice after a later choice, relative to one after a first choice."""
NUM_SQUARINGS = 9
"""Squarings of the transition matrix of draft depths: it is stationary after 2^9 windows."""


@cache
def menu(depth: int, capabilities: Capabilities | None = None) -> tuple[Cycle, ...]:
    """Return plain decoding, and then the cycles whose passes accept at most `depth` drafts.

    Fused plans and trees are listed twice: with full groups, and with groups that have fewer rows
    the deeper the draft before them is. capabilities: None allows every plan but trees.
    """
    if capabilities is not None and capabilities.fixed_lookahead is not None:
        depth = min(depth, capabilities.fixed_lookahead)
    counts = sorted({count for count in (*DRAFT_COUNTS, depth) if 0 < count <= depth})
    shapes = [groups for n in counts for groups in ((*range(n, 0, -1), 1), (n,) * (n + 1))]
    shapes += [groups for groups in TILE_GROUPS if len(groups) <= depth + 1]
    found = [make_cycle("ar", 0), *(make_cycle("two-pass", count) for count in counts)]
    found += map(fused_cycle, dict.fromkeys(shapes))
    for size in () if capabilities is None else capabilities.exact_trees:
        if (full := tree_depth(size)) <= depth:  # rows of a full group
            smaller = [
                1 if any(node) else max(full - len(node), 1) for node in tree_nodes(size, depth)
            ]
            found += [
                tree_cycle(groups, depth) for groups in ((full, *smaller), (full,) * (size + 1))
            ]
    return tuple(
        cycle for cycle in found if capabilities is None or capabilities.allows(cycle.plans)
    )


def expected_tokens(cycle: Cycle, cumulative: Floats) -> float:
    """Return the expected tokens per pass of one sequence, if passes are independent.
    cumulative [L+1]: the probabilities that the first i drafts of a chain are all accepted.

    A window has as many drafts in a row (its depth g) as the group of the last accepted row in the
    pass before has rows. So g is a Markov chain over passes, and its stationary distribution is
    computed. A pass writes the drafts that are accepted at its depth, and one more token.
    """
    plan = cycle.plans[0]
    if not plan.is_fused:
        return 1.0 + float(cumulative[1 : cycle.depth + 1].sum()) / 2
    accepted = cumulative[: plan.drafts + 1]
    if plan.parents:
        accepted = np.append(1.0, _tree_acceptance(plan, cumulative))
    in_depth, parents, next_depth = _layout(plan)
    # [g, a]: the probability that row a is accepted in a window of depth g
    row_accepted = in_depth * accepted
    row_is_last = row_accepted.copy()  # [g, a]: ..., and none of the drafts that follow it
    np.subtract.at(row_is_last.T, parents, row_accepted[:, 1:].T)
    # [g, h]: the probability that depth h follows depth g
    transitions = np.maximum(row_is_last, 0.0) @ next_depth
    # If half of all steps change nothing, the stationary distribution is the same, and the chain
    # has no period.
    transitions = (transitions + np.eye(len(transitions))) / 2
    for _ in range(NUM_SQUARINGS):
        transitions = transitions @ transitions
    return 1.0 + float(transitions[0] @ row_accepted[:, 1:].sum(1))


@cache
def _layout(plan: Plan) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """Return three arrays. in_depth [depth+1,D+1]: 1 at [g, a] if a window of depth g has row a.
    parents [D]: the row that each draft follows. next_depth [D+1,depth+1]: 1 at [a, g] if group a
    has g rows, so that the next window is g deep if row a is the last accepted one."""
    depths = np.arange(plan.depth + 1)
    in_depth = plan.row_position[: plan.drafts + 1] <= depths[:, None]
    next_depth = np.equal.outer(np.array(plan.groups), depths)
    parents = np.array(plan.parents or range(plan.drafts), np.int64)
    return in_depth.astype(float), parents, next_depth.astype(float)


def _tree_acceptance(plan: Plan, cumulative: Floats) -> list[float]:
    """Return [D]: the probability that each draft of a tree is accepted, by its row."""
    found, rates = [], cumulative[1:] / np.maximum(cumulative[:-1], 1e-9)
    # node: for every step from the root, the rank of the choice
    for node in tree_nodes(plan.drafts, plan.depth):
        accepted, penalty = 1.0, 1.0  # penalty: AFTER_LATER_RATIO for each later choice on the way
        for depth, rank in enumerate(node):
            # the probability that the first choice is right here
            first = penalty * float(rates[depth])
            accepted *= first if rank == 0 else LATER_CHOICE_SHARES[rank - 1] * (1 - first)
            penalty *= 1.0 if rank == 0 else AFTER_LATER_RATIO
        found.append(accepted)
    return found


DECISION_INTERVAL_PASSES = 12
"""The fewest passes between two decisions."""
DECISION_TIME_SHARE = 0.005
"""The largest share of decoding time that decisions may take."""
SWITCH_MARGIN = 1.03
"""A cycle with drafts is kept only if its expected rate is at least this many times plain
decoding's, and left only for one whose rate is at least this many times its own."""
IDLE_PASSES, TRIAL_PASSES = 2000, 4
"""After a decision, a cycle that did not run in the last IDLE_PASSES is tried for TRIAL_PASSES if
its expected rate is at least that of the cycle in use. Plain decoding is tried whatever its rate,
since all cycles are compared with it."""
DEFAULT_ACCEPTANCE = 0.1
"""The initial acceptance rate of each look-ahead draft, if the bundle states none."""
NGRAM_PRIOR = 0.6
"""The initial acceptance rate of n-gram drafts."""
FORCED_PRIOR = 0.98
"""The initial acceptance rate of drafts that a grammar forces."""
NGRAM_PRIOR_PASSES = 2.0
"""A new sequence starts with the rates of all sequences, which count for so many of its passes:
few, because n-gram drafts that fail in one text may do well in others."""


@dataclass(frozen=True)
class Candidate:
    """A cycle, with its expected tokens and seconds per pass, for each sequence of a batch."""

    cycle: Cycle
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second and sequence."""
        return self.tokens / self.seconds


class Tuner:
    """Pass times and acceptance of drafts for one sampler. All requests of a session with that
    sampler share it."""

    def __init__(
        self,
        times: PassTimes,
        max_drafts: int,
        acceptance: Sequence[float],
        capabilities: Capabilities | None = None,
    ) -> None:
        """max_drafts: L of the bundle. acceptance: the cumulative acceptance by position that the
        bundle states for this sampler; empty if it states none. capabilities: as for `menu`."""
        rates = [
            after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])
        ]
        prior = [*rates, *[DEFAULT_ACCEPTANCE] * max_drafts][:max_drafts]
        self.times_by_batch = {1: times}
        self.max_drafts = max_drafts
        self._capabilities = capabilities
        self.lookahead_acceptance = ConditionalAcceptance(prior)
        self.ngram_acceptance: dict[int, ConditionalAcceptance] = {}
        # what the last decision chose; at first plain decoding
        [self.decided] = self.candidates(0)
        # By depth limit and batch: the decided candidate, the one on trial, and the pass that ends
        # the trial.
        self._decisions: dict[tuple[int, int], tuple[Candidate, Candidate, int]] = {}
        # by plan and batch: the number of its last pass
        self._ran: dict[tuple[Plan, int], int] = {}
        self._passes, self._decided_at = 0, 0  # number of passes so far; at the last decision
        # Seconds of all passes so far, and how many there must be before decisions have a share of
        # them again.
        self._decoding_seconds, self._next_decision_seconds = 0.0, 0.0

    def times(self, batch: int = 1) -> PassTimes:
        """Return the times of passes over `batch` slots. If this batch size was not timed, return
        those of one slot: a pass is then estimated as one window with as many rows."""
        return self.times_by_batch.get(batch, self.times_by_batch[1])

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """The seconds of one pass with `plan`."""
        return self.times(batch).seconds(shape_of(plan, batch))

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """Note that a pass with `plan` took `seconds`."""
        self._passes += 1
        self._decoding_seconds += seconds
        self._ran[plan, batch] = self._passes
        self.times(batch).record(shape_of(plan, batch), seconds)

    def ngram(
        self, match_length: int, own: dict[int, ConditionalAcceptance] | None = None
    ) -> ConditionalAcceptance:
        """Return the acceptance of n-gram drafts after a match of `match_length` tokens. own: the
        acceptances of one sequence, by `match_length`; None for all sequences together."""
        if match_length not in self.ngram_acceptance:
            prior = FORCED_PRIOR if match_length == FORCED_MATCH else NGRAM_PRIOR
            self.ngram_acceptance[match_length] = ConditionalAcceptance([prior] * self.max_drafts)
        if own is None:
            return self.ngram_acceptance[match_length]
        if match_length not in own:
            own[match_length] = ConditionalAcceptance(
                self.ngram_acceptance[match_length].rates, NGRAM_PRIOR_PASSES
            )
        return own[match_length]

    def new_acceptance(self) -> ConditionalAcceptance:
        """The acceptance of a new sequence, which starts with the rates of all sequences."""
        return ConditionalAcceptance(self.lookahead_acceptance.rates)

    def candidates(
        self, depth: int, batch: int = 1, cumulative: Floats | None = None
    ) -> list[Candidate]:
        """Return the candidates of the menu for `depth` whose windows are not wider than the timed
        ones, the fastest first.

        cumulative: the mean cumulative acceptance of the sequences in the batch; None: the
        acceptance of all sequences so far.
        """
        if cumulative is None:
            cumulative = cumulative_acceptance(self.lookahead_acceptance.rates)
        widest = self.times_by_batch[1].timed_widths[-1]
        found = []
        for cycle in menu(depth, self._capabilities):
            if cycle.plans[0].width <= widest:
                seconds = sum(self.plan_seconds(plan, batch) for plan in cycle.plans)
                tokens = expected_tokens(cycle, cumulative)
                found.append(Candidate(cycle, tokens, seconds / len(cycle.plans)))
        return sorted(found, key=lambda candidate: -candidate.rate)

    def next_candidate(
        self, depth: int, batch: int, acceptances: Sequence[ConditionalAcceptance]
    ) -> Candidate:
        """Return the candidate for the next pass, with drafts at most `depth` deep. It is decided
        anew from time to time, and at once for a new depth or batch size. All decisions together
        take at most the share DECISION_TIME_SHARE of decoding time.
        acceptances: how often look-ahead drafts are accepted in each sequence of the batch."""
        key, started = (depth, batch), time.perf_counter()
        self.decided, *_ = self._decisions.get(key, (self.decided,))
        passes_enough = self._passes - self._decided_at >= DECISION_INTERVAL_PASSES
        if key not in self._decisions or (
            passes_enough and self._decoding_seconds >= self._next_decision_seconds
        ):
            decided = self.decide(depth, batch, acceptances)
            self._decisions[key] = decided, self._trial, self._passes + TRIAL_PASSES
            earned_back = (time.perf_counter() - started) / DECISION_TIME_SHARE
            since = max(self._next_decision_seconds, self._decoding_seconds)
            self._decided_at, self._next_decision_seconds = self._passes, since + earned_back
        self.decided, trial, trial_end = self._decisions[key]
        return trial if self._passes < trial_end else self.decided

    def decide(
        self, depth: int, batch: int = 1, acceptances: Sequence[ConditionalAcceptance] = ()
    ) -> Candidate:
        """Return the fastest candidate, or the one in use if the fastest is not SWITCH_MARGIN times
        as fast. If the one in use is not SWITCH_MARGIN times as fast as plain decoding, plain
        decoding takes its place in this comparison."""
        cumulative = None
        if acceptances:
            cumulative = np.mean(
                [cumulative_acceptance(acceptance.rates) for acceptance in acceptances], axis=0
            )
        candidates = self.candidates(depth, batch, cumulative)
        best, plain = candidates[0], next(c for c in candidates if not c.cycle.depth)
        in_use = next((c for c in candidates if c.cycle == self.decided.cycle), plain)
        if in_use.rate < SWITCH_MARGIN * plain.rate:
            in_use = plain
        self.decided = best if best.rate >= SWITCH_MARGIN * in_use.rate else in_use
        self._trial = self.decided
        for candidate in candidates if self._passes else []:
            last = self._ran.get((candidate.cycle.plans[0], batch), -IDLE_PASSES)
            promising = candidate is plain or candidate.rate >= self.decided.rate
            if promising and self._passes - last >= IDLE_PASSES:
                self._trial = candidate
                break
        # It counts as run even if a plan that a request names runs instead.
        self._ran[self._trial.cycle.plans[0], batch] = self._passes
        return self.decided


TimeMaskedPass = Callable[[PassKind], tuple[float, float]]
"""Seconds of trunk and tail in a pass that changes no sequence
(`pass_runtime.decode.runner.Runner.time_masked_pass`)."""

SAMPLED_ACCEPTANCE_RATIO = 0.6
"""The acceptance of sampled drafts relative to greedy ones, if only that of these is stated."""


def stated_acceptance(lookahead: LookaheadInfo, sampler: Sampler) -> tuple[float, ...]:
    """[L] cumulative acceptance that the bundle states for this sampler; derived from the greedy
    one if it states none for sampling."""
    greedy, sampled = lookahead.acceptance_per_position, lookahead.acceptance_per_position_sampled
    if sampler == "greedy" or sampled:
        return greedy if sampler == "greedy" else sampled
    return tuple(share * SAMPLED_ACCEPTANCE_RATIO**i for i, share in enumerate(greedy, 1))


class Tuners:
    """The tuners of a session, each made for the first request with its sampler. Passes of all
    widths are timed for the first sampler and for each new batch size, and for later samplers only
    those that show how their tails differ.

    Which passes are timed depends on the bundle, the engine and the capacity alone, not on the room
    that running sequences leave in the KV cache: with too little room, timing is put off.
    """

    def __init__(
        self,
        manifest: Manifest,
        capabilities: Capabilities,
        time_masked_pass: TimeMaskedPass,
        room: Callable[[], int],
    ) -> None:
        """room: returns how many tokens of KV capacity a window may take now."""
        self._manifest = manifest
        self._capabilities = capabilities
        self._time_masked_pass = time_masked_pass
        self._room = room
        self._plans = {batch: self._timed_plans(batch) for batch in (1, *capabilities.batch_sizes)}
        self._tuners: dict[Sampler, Tuner] = {}

    def is_timed(self, sampler: Sampler, batch: int) -> bool:
        """Whether `get` has nothing to time for this sampler and batch size."""
        if sampler not in self._tuners:
            return False
        return batch == 1 or not self._plans[batch] or batch in self._tuners[sampler].times_by_batch

    def get(self, sampler: Sampler, batch: int = 1) -> Tuner | None:
        """Return the tuner for `sampler`, which has the times of passes over `batch` slots.

        Return None if passes must be timed first, but the running sequences leave too little room
        in the KV cache for their windows, or if half the KV capacity has no room for windows of two
        different widths.
        """
        if not self.is_timed(sampler, batch):
            widest = max((plan.width for plan in (*self._plans[1], *self._plans[batch])), default=0)
            if not self._plans[1] or self._capabilities.padded_width(widest) > self._room():
                return None
            if sampler not in self._tuners:
                stated = stated_acceptance(self._manifest.lookahead, sampler)
                length = self._manifest.lookahead.length
                self._tuners[sampler] = Tuner(
                    self._times(sampler), length, stated, self._capabilities
                )
            if not self.is_timed(sampler, batch):
                self._tuners[sampler].times_by_batch[batch] = self._times(sampler, batch)
        return self._tuners[sampler]

    def _times(self, sampler: Sampler, batch: int = 1) -> PassTimes:
        """Time passes; only a few if this batch size was timed for another sampler already."""
        plans = self._plans[batch]
        known = (tuner.times_by_batch.get(batch) for tuner in self._tuners.values())
        other_sampler = next((times for times in known if times is not None), None)
        if other_sampler is not None:
            max_drafts = max(plan.drafts for plan in plans if not plan.groups)
            plans = [
                plan
                for plan in plans
                if not plan.drafts or (plan.drafts == max_drafts and not plan.groups)
            ]
        timed = measure(lambda plan: self._time_masked_pass(PassKind(plan, batch, sampler)), plans)
        return PassTimes(
            {shape_of(plan, batch): seconds for plan, seconds in timed.items()}, other_sampler
        )

    def _timed_plans(self, batch: int) -> list[Plan]:
        """Return the plans to time over `batch` slots, the narrowest first. Their windows take at
        most half the capacity, so that texts have the other half. Return none if only one width
        is left, since no other width can be estimated from one."""
        plans = probe_plans(self._manifest.lookahead.length, batch)
        half = self._capabilities.max_capacity // 2
        plans = [plan for plan in plans if self._capabilities.padded_width(plan.width) <= half]
        plans = [plan for plan in plans if self._capabilities.allows([plan])]
        return plans if len({plan.width for plan in plans}) > 1 else []
