"""The mode `auto`: chooses the cycle with the most expected tokens per second, by pass times and
the acceptance of drafts so far (`estimates`).

`menu` lists the cycles to choose from, and `expected_tokens` says how many tokens their passes
write. A session has a tuner for each sampler, because each sampler has tails of its own.
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
from pass_runtime.errors import OfOneProcess
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
"""How many drafts the two-pass and fused plans of the menu have; there are also plans with L."""
LATER_CHOICE_SHARES = (0.30, 0.12, 0.07, 0.048, 0.036)
"""The probabilities that the second, third, ... likeliest token is right if the likeliest is wrong.
Measured with SmolLM2-135M: means over depths 1 and 2, greedy and at temperature 0.8; those of the
second token were 0.23 to 0.37."""
AFTER_LATER_RATIO = 0.75
"""The acceptance of a first choice after a later choice, relative to one after a first choice."""
NUM_SQUARINGS = 9
"""How often `expected_tokens` squares its transition matrix: it is stationary after 2^9 windows."""


@cache
def menu(depth: int, capabilities: Capabilities | None = None) -> tuple[Cycle, ...]:
    """Return plain decoding, and then the cycles whose passes accept at most `depth` drafts.

    A fused plan or a tree is listed twice: with groups that have fewer rows the deeper in the
    window they begin, and with full groups. capabilities: None allows every plan but trees.
    """
    if capabilities is not None and capabilities.fixed_lookahead is not None:
        depth = min(depth, capabilities.fixed_lookahead)
    counts = sorted({count for count in (*DRAFT_COUNTS, depth) if 0 < count <= depth})
    group_sizes = [sizes for n in counts for sizes in ((*range(n, 0, -1), 1), (n,) * (n + 1))]
    group_sizes += [sizes for sizes in TILE_GROUPS if len(sizes) <= depth + 1]
    cycles = [make_cycle("ar", 0), *(make_cycle("two-pass", count) for count in counts)]
    cycles += map(fused_cycle, dict.fromkeys(group_sizes))
    for drafts in () if capabilities is None else capabilities.exact_trees:
        if (full := tree_depth(drafts)) <= depth:  # the rows of a full group, too
            # Drafts whose path has a later choice are seldom accepted: one row follows them.
            smaller = [
                1 if any(node) else max(full - len(node), 1) for node in tree_nodes(drafts, depth)
            ]
            cycles += [
                tree_cycle(sizes, depth) for sizes in ((full, *smaller), (full,) * (drafts + 1))
            ]
    return tuple(
        cycle for cycle in cycles if capabilities is None or capabilities.allows(cycle.plans)
    )


def expected_tokens(cycle: Cycle, cumulative: Floats) -> float:
    """Return the expected number of tokens that a pass writes in one sequence, if passes are
    independent. cumulative [L+1]: from `cumulative_acceptance`.

    In a fused window or a tree, the depth g of the drafts is the number of rows in the group of the
    last accepted row of the pass before. So the depths of successive passes are a Markov chain,
    whose stationary distribution is computed. A pass writes the drafts that are accepted at its
    depth, and the bonus token.
    """
    plan = cycle.plans[0]
    if not plan.is_fused:  # Plain decoding has no drafts, two-pass verifies in every second pass.
        return 1.0 + float(cumulative[1 : cycle.depth + 1].sum()) / 2
    accepted = cumulative[: plan.drafts + 1]
    if plan.parents:
        accepted = np.append(1.0, _tree_acceptance(plan, cumulative))
    in_depth, parents, next_depth = _layout(plan)
    # [g, a]: the probability that row a is accepted in a window of depth g
    row_accepted = in_depth * accepted
    # [g, a]: the probability that row a is accepted, and no draft that follows it
    row_is_last = row_accepted.copy()
    np.subtract.at(row_is_last.T, parents, row_accepted[:, 1:].T)
    # [g, h]: the probability that depth h follows depth g
    transitions = np.maximum(row_is_last, 0.0) @ next_depth
    # Keep the depth with probability 1/2: the stationary distribution stays the same, and depths
    # that alternate, for which the powers of the matrix do not converge, are excluded.
    transitions = (transitions + np.eye(len(transitions))) / 2
    for _ in range(NUM_SQUARINGS):
        transitions = transitions @ transitions
    return 1.0 + float(transitions[0] @ row_accepted[:, 1:].sum(1))


@cache
def _layout(plan: Plan) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """Return three arrays for a plan with D drafts; row 0 is the root, rows 1 to D are the drafts.
    in_depth [depth+1,D+1]: 1 at [g, a] if a window of depth g has row a. parents [D]: the row that
    each draft follows. next_depth [D+1,depth+1]: 1 at [a, g] if the group after row a has g rows,
    so that the next window is g deep if row a is the last accepted one."""
    depths = np.arange(plan.depth + 1)
    in_depth = plan.row_position[: plan.drafts + 1] <= depths[:, None]
    next_depth = np.equal.outer(np.array(plan.groups), depths)
    parents = np.array(plan.parents or range(plan.drafts), np.int64)
    return in_depth.astype(float), parents, next_depth.astype(float)


def _tree_acceptance(plan: Plan, cumulative: Floats) -> list[float]:
    """Return the probabilities [D] that the drafts of a tree are accepted, by row."""
    probabilities, rates = [], cumulative[1:] / np.maximum(cumulative[:-1], 1e-9)
    # A node is a draft, given as its path from the root: the rank of each choice, 0 for the first.
    for node in tree_nodes(plan.drafts, plan.depth):
        accepted, penalty = 1.0, 1.0
        for depth, rank in enumerate(node):
            first_is_right = penalty * float(rates[depth])
            if rank == 0:
                accepted *= first_is_right
            else:
                accepted *= LATER_CHOICE_SHARES[rank - 1] * (1 - first_is_right)
                penalty *= AFTER_LATER_RATIO
        probabilities.append(accepted)
    return probabilities


DECISION_INTERVAL_PASSES = 12
"""The fewest passes between two decisions."""
DECISION_TIME_SHARE = 0.005
"""The share of the decoding time that decisions may take."""
SWITCH_MARGIN = 1.03
"""The cycle in use is left only for one whose expected rate is at least this many times as high."""
DRAFT_MARGIN = 1.06
"""A cycle with drafts is used only if its expected rate is at least this many times that of plain
decoding: its passes take the host about 0.1 ms more, and its gain depends on the text."""
IDLE_PASSES, PLAIN_IDLE_PASSES, TRIAL_PASSES = 2000, 128, 4
"""After a decision, a cycle that did not run in the last IDLE_PASSES passes runs for TRIAL_PASSES
passes if its expected rate is at least that of the chosen cycle. Plain decoding is tried at any
rate and after PLAIN_IDLE_PASSES, because all cycles are compared with it."""
DEFAULT_ACCEPTANCE = 0.1
"""The initial acceptance rate of each look-ahead draft, if the bundle states none."""
NGRAM_PRIOR = 0.6
"""The initial acceptance rate of n-gram drafts."""
FORCED_PRIOR = 0.98
"""The initial acceptance rate of drafts that a grammar forces."""
NGRAM_PRIOR_PASSES = 2.0
"""The n-gram rates of a new sequence start with those of all sequences, which weigh as much as this
many of its own passes: few, because n-gram drafts that fail in one text may do well in others."""


@dataclass(frozen=True)
class Candidate:
    """A cycle, with the tokens that a pass is expected to write in each sequence, and the seconds
    that a pass over the batch is expected to take."""

    cycle: Cycle
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second in each sequence."""
        return self.tokens / self.seconds


class Tuner(OfOneProcess):
    """Keeps pass times and acceptance rates for one sampler, and chooses cycles by them. All
    requests of a session with that sampler share the tuner."""

    def __init__(
        self,
        times: PassTimes,
        max_drafts: int,
        acceptance: Sequence[float],
        capabilities: Capabilities | None = None,
    ) -> None:
        """times: of passes over one slot. max_drafts: L of the bundle. acceptance: the cumulative
        acceptance by position that the bundle states for this sampler; empty if it states none.
        capabilities: as for `menu`."""
        rates = [
            after / before if before else 0.0 for before, after in pairwise([1.0, *acceptance])
        ]
        prior = [*rates, *[DEFAULT_ACCEPTANCE] * max_drafts][:max_drafts]
        self.times_by_batch = {1: times}
        self.max_drafts = max_drafts
        self._capabilities = capabilities
        self.lookahead_acceptance = ConditionalAcceptance(prior)
        self.ngram_acceptance: dict[int, ConditionalAcceptance] = {}
        # the candidate that the last decision chose; at first plain decoding
        [self.decided] = self.candidates(0)
        # By depth and batch: the chosen candidate, the one that is tried, and the number of passes
        # at which the trial ends.
        self._decisions: dict[tuple[int, int], tuple[Candidate, Candidate, int]] = {}
        # by plan and batch: the number of passes when it last ran
        self._last_run: dict[tuple[Plan, int], int] = {}
        self._passes, self._passes_at_decision = 0, 0  # passes so far, and at the last decision
        # The seconds of all passes so far, and how many there must be before the next decision.
        self._decoding_seconds, self._next_decision_seconds = 0.0, 0.0

    def times(self, batch: int = 1) -> PassTimes:
        """Return the times of passes over `batch` slots. If this batch size was not timed, return
        those for one slot, which estimate the pass as one window with as many rows."""
        return self.times_by_batch.get(batch, self.times_by_batch[1])

    def plan_seconds(self, plan: Plan, batch: int = 1) -> float:
        """Return the expected seconds of one pass with `plan` over `batch` slots."""
        return self.times(batch).seconds(shape_of(plan, batch))

    def observe(self, plan: Plan, batch: int, seconds: float) -> None:
        """Note that a pass with `plan` over `batch` slots took `seconds`."""
        self._passes += 1
        self._decoding_seconds += seconds
        self._last_run[plan, batch] = self._passes
        self.times(batch).record(shape_of(plan, batch), seconds)

    def ngram(
        self, match_length: int, own: dict[int, ConditionalAcceptance] | None = None
    ) -> ConditionalAcceptance:
        """Return the acceptance of n-gram drafts after a match of `match_length` tokens. own: the
        acceptances of one sequence by match length, to which a missing one is added; without
        `own`, return the acceptance in all sequences."""
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
        """Return the acceptance of a new sequence, which starts with the rates of all sequences."""
        return ConditionalAcceptance(self.lookahead_acceptance.rates)

    def candidates(
        self, depth: int, batch: int = 1, cumulative: Floats | None = None
    ) -> list[Candidate]:
        """Return the candidates of the menu for `depth`, the fastest first, without those whose
        windows are wider than the timed ones.

        cumulative: the mean cumulative acceptance of the sequences in the batch; None takes that of
        all sequences so far.
        """
        if cumulative is None:
            cumulative = cumulative_acceptance(self.lookahead_acceptance.rates)
        widest = self.times_by_batch[1].timed_widths[-1]
        candidates = []
        for cycle in menu(depth, self._capabilities):
            if cycle.plans[0].width <= widest:
                seconds = sum(self.plan_seconds(plan, batch) for plan in cycle.plans)
                tokens = expected_tokens(cycle, cumulative)
                candidates.append(Candidate(cycle, tokens, seconds / len(cycle.plans)))
        return sorted(candidates, key=lambda candidate: -candidate.rate)

    def next_candidate(
        self, depth: int, batch: int, acceptances: Sequence[ConditionalAcceptance]
    ) -> Candidate:
        """Return the candidate for the next pass, with drafts at most `depth` deep: decide anew
        from time to time, and at once for a new depth or batch size. acceptances: how often
        look-ahead drafts are accepted in each sequence of the batch."""
        key, started = (depth, batch), time.perf_counter()
        # `decide` compares with the candidate in use, here the last one for this depth and batch.
        self.decided, *_ = self._decisions.get(key, (self.decided,))
        enough_passes = self._passes - self._passes_at_decision >= DECISION_INTERVAL_PASSES
        if key not in self._decisions or (
            enough_passes and self._decoding_seconds >= self._next_decision_seconds
        ):
            decided = self.decide(depth, batch, acceptances)
            self._decisions[key] = decided, self._trial, self._passes + TRIAL_PASSES
            self._passes_at_decision = self._passes
            # The next decision waits until this one has taken no more than its share of the time.
            waiting_seconds = (time.perf_counter() - started) / DECISION_TIME_SHARE
            earliest = max(self._next_decision_seconds, self._decoding_seconds)
            self._next_decision_seconds = earliest + waiting_seconds
        self.decided, trial, trial_end = self._decisions[key]
        return trial if self._passes < trial_end else self.decided

    def decide(
        self, depth: int, batch: int = 1, acceptances: Sequence[ConditionalAcceptance] = ()
    ) -> Candidate:
        """Return the fastest candidate, or the one in use if the fastest is not SWITCH_MARGIN times
        as fast; plain decoding if that is not DRAFT_MARGIN times as fast as plain decoding. Also
        choose the candidate to try."""
        cumulative = None
        if acceptances:
            cumulative = np.mean(
                [cumulative_acceptance(acceptance.rates) for acceptance in acceptances], axis=0
            )
        candidates = self.candidates(depth, batch, cumulative)
        best, plain = candidates[0], next(c for c in candidates if not c.cycle.depth)
        in_use = next((c for c in candidates if c.cycle == self.decided.cycle), plain)
        self.decided = best if best.rate >= SWITCH_MARGIN * in_use.rate else in_use
        if self.decided.rate < DRAFT_MARGIN * plain.rate:
            self.decided = plain
        self._trial = self.decided
        for candidate in candidates if self._passes else []:  # no trial before the first pass
            last_run = self._last_run.get((candidate.cycle.plans[0], batch), -IDLE_PASSES)
            promising = candidate is plain or candidate.rate >= self.decided.rate
            idle_passes = PLAIN_IDLE_PASSES if candidate is plain else IDLE_PASSES
            if promising and self._passes - last_run >= idle_passes:
                self._trial = candidate
                break
        # It counts as run even if a request names another plan: else it would be tried for ever.
        self._last_run[self._trial.cycle.plans[0], batch] = self._passes
        return self.decided


TimeMaskedPass = Callable[[PassKind], tuple[float, float]]
"""`Runner.time_masked_pass`: returns the seconds of trunk and tail in a pass over masked slots."""

SAMPLED_ACCEPTANCE_RATIO = 0.6
"""The acceptance of sampled drafts relative to greedy ones, if a bundle states only the latter."""


def stated_acceptance(lookahead: LookaheadInfo, sampler: Sampler) -> tuple[float, ...]:
    """Return the cumulative acceptance [L] that the bundle states for this sampler. If it states
    none for sampling, derive it from that of greedy decoding."""
    greedy, sampled = lookahead.acceptance_per_position, lookahead.acceptance_per_position_sampled
    if sampler == "greedy":
        return greedy
    return sampled or tuple(p * SAMPLED_ACCEPTANCE_RATIO**i for i, p in enumerate(greedy, 1))


class Tuners:
    """The tuners of a session, each made for the first request with its sampler. For the first
    sampler, and for each new batch size, passes of all widths are timed; for later samplers only
    those that show how their tails differ.

    If running sequences leave too little room in the KV cache, timing is put off. Wide passes are
    not left out, so that the estimates do not depend on what else runs.
    """

    def __init__(
        self,
        manifest: Manifest,
        capabilities: Capabilities,
        time_masked_pass: TimeMaskedPass,
        room: Callable[[], int],
    ) -> None:
        """room: returns how many entries of the KV cache a window may take now."""
        self._manifest = manifest
        self._capabilities = capabilities
        self._time_masked_pass = time_masked_pass
        self._room = room
        self._plans = {batch: self._timed_plans(batch) for batch in (1, *capabilities.batch_sizes)}
        self._tuners: dict[Sampler, Tuner] = {}

    def is_timed(self, sampler: Sampler, batch: int) -> bool:
        """Whether `get` times no passes for this sampler and batch: all that can be timed were."""
        if sampler not in self._tuners:
            return False
        return batch == 1 or not self._plans[batch] or batch in self._tuners[sampler].times_by_batch

    def get(self, sampler: Sampler, batch: int = 1) -> Tuner | None:
        """Return the tuner for `sampler`, with the times of passes over `batch` slots.

        Return None if passes must be timed first, but the KV cache has too little room for their
        windows: sequences run, or half the capacity has room for windows of one width only.
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
        """Time passes over `batch` slots. If some were timed for another sampler before, time only
        plans without drafts in the window, and the widest that verifies without drafting."""
        plans = self._plans[batch]
        by_sampler = (tuner.times_by_batch.get(batch) for tuner in self._tuners.values())
        other_sampler = next((times for times in by_sampler if times is not None), None)
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
        """Return the plans to time over `batch` slots: those of `probe_plans` that the backend can
        run and whose windows take at most half the KV capacity, so that texts have the other half.
        Return no plan if all have the same width: other widths could not be estimated."""
        plans = probe_plans(self._manifest.lookahead.length, batch)
        half = self._capabilities.max_capacity // 2
        plans = [plan for plan in plans if self._capabilities.padded_width(plan.width) <= half]
        plans = [plan for plan in plans if self._capabilities.allows([plan])]
        return plans if len({plan.width for plan in plans}) > 1 else []
