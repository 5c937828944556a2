"""Chooses the next pass for the scheduler: the next plan of the cycle, or a plan that verifies
n-gram drafts.

Here, drafts that a grammar forces count as n-gram drafts, too. No choice can change the text,
because the model verifies every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.base import Capabilities
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, Cycle, Plan, make_cycle
from pass_runtime.decode.sequence import Slot
from pass_runtime.errors import PassError
from pass_runtime.tuning.estimates import ConditionalAcceptance, cumulative_acceptance
from pass_runtime.tuning.tuner import SWITCH_MARGIN, Candidate, Tuner

NGRAM_MARGIN = 1.10
"""If the next plan of the cycle can verify some n-gram drafts, a separate pass that verifies more
of them is run only if it promises at least this many times the cycle's tokens per second."""

NextPass = tuple[Plan, tuple[tuple[int, ...] | None, ...]]
"""A plan, and n-gram drafts for each slot that decodes; None keeps the slot's window as it is."""


class DraftPolicy:
    """Decides which n-gram drafts are verified. This base class, for requests that name a plan,
    prefers n-gram drafts to other drafts wherever there are any."""

    def prefers_ngrams(self, slot: Slot, plan: Plan) -> bool:  # noqa: ARG002
        """Whether a slot's n-gram drafts are better than those in its window of `plan`."""
        return True

    def ngram_count(
        self,
        slots: Sequence[Slot],  # noqa: ARG002
        next_plan: Plan | None,
        plans: Sequence[Plan],
    ) -> int:
        """Return how many n-gram drafts of each slot to verify in a separate pass; 0 if the next
        plan of the cycle is better.

        next_plan: the next plan of the cycle; None if it cannot verify drafts. plans: the plans of
        a separate pass; plans[i] verifies i + 1 drafts.
        """
        # A next plan that verifies drafts gets the n-gram drafts into its own window.
        return len(plans) if next_plan is None else 0


class ExpectedRate(DraftPolicy):
    """Prefers n-gram drafts if they promise more tokens per second than `candidate`, the cycle that
    `auto` chose, does with its own drafts."""

    def __init__(self, tuner: Tuner, candidate: Candidate, batch: int) -> None:
        self._tuner, self._candidate, self._batch = tuner, candidate, batch

    def prefers_ngrams(self, slot: Slot, plan: Plan) -> bool:
        ngram = cumulative_acceptance(self._acceptance(slot).rates)
        lookahead = cumulative_acceptance(self._tuner.lookahead_acceptance.rates)
        expected_ngram = float(ngram[1 : plan.depth + 1].sum())
        expected_lookahead = float(lookahead[1 : slot.num_drafts + 1].sum())
        return expected_ngram > expected_lookahead

    def ngram_count(
        self, slots: Sequence[Slot], next_plan: Plan | None, plans: Sequence[Plan]
    ) -> int:
        ngram_rate, count = self._best(slots, plans)
        cycle_rate = self._candidate.rate * len(slots)  # a candidate's rate is for one sequence
        if next_plan is not None:
            is_better = count > next_plan.depth and ngram_rate >= NGRAM_MARGIN * cycle_rate
            return count if is_better else 0
        if ngram_rate >= SWITCH_MARGIN * cycle_rate:
            return count
        for slot in slots:
            # Rates of drafts that are not verified must not stay low for ever.
            if slot.ngram:
                for acceptance in (self._acceptance(slot), self._tuner.ngram(slot.match_length)):
                    acceptance.forget()
        return 0

    def _acceptance(self, slot: Slot) -> ConditionalAcceptance:
        return self._tuner.ngram(slot.match_length, slot.current.ngram_acceptance)

    def _best(self, slots: Sequence[Slot], plans: Sequence[Plan]) -> tuple[float, int]:
        """Return the highest expected tokens per second of `plans` (plans[i] verifies i + 1 n-gram
        drafts), and how many drafts that plan verifies; 0 and 0 without plans."""
        matching = [slot for slot in slots if slot.ngram]
        # entry i: the probability that the first i drafts are accepted
        expected = [cumulative_acceptance(self._acceptance(slot).rates) for slot in matching]
        rates = []
        for drafts, plan in enumerate(plans, 1):
            tokens = sum(
                cumulative[: min(drafts, len(slot.ngram)) + 1].sum()
                for slot, cumulative in zip(matching, expected, strict=True)
            )
            tokens += len(slots) - len(matching)  # one token for each sequence without a match
            rates.append(float(tokens) / self._tuner.plan_seconds(plan, self._batch))
        best = max(rates, default=0.0)
        return best, rates.index(best) + 1 if rates else 0


@dataclass(frozen=True)
class Situation:
    """All that the choice of the next pass depends on.

    slots: those that decode. staged_plan: the plan of their windows on the device; None if there
    are none. room: how many tokens fit into the KV cache after the longest sequence.
    """

    cycle: Cycle
    staged_plan: Plan | None
    room: int
    capabilities: Capabilities
    slots: Sequence[Slot]
    policy: DraftPolicy

    def next_pass(self) -> NextPass | None:
        """Return the next pass; None if there is not even room for a plain one."""
        has_ngrams = any(slot.ngram for slot in self.slots)
        return (self._with_ngrams() if has_ngrams else None) or self._from_cycle()

    def _with_ngrams(self) -> NextPass | None:
        """Return a pass that verifies n-gram drafts; None if the policy wants none. Its plan is the
        next one of the cycle. A plan that only verifies takes its place if the cycle's has no draft
        rows, does not fit, or verifies fewer drafts than the policy wants."""
        slots, policy, plan = self.slots, self.policy, self._verifying_plan()
        limit = self.capabilities.fixed_lookahead or MAX_LOOKAHEAD  # of the widest verify plan
        max_drafts = min(max(len(slot.ngram) for slot in slots), limit)
        if plan is None or max_drafts > plan.depth:
            verifying = map(self.capabilities.verify_plan, range(1, max_drafts + 1))
            plans = [each for each in verifying if self._fits(each.width)]
            if count := policy.ngram_count(slots, plan, plans):
                return plans[count - 1], tuple(slot.ngram[:count] or None for slot in slots)
        if plan is None:
            return None
        drafts = tuple(
            slot.ngram[: plan.depth] if slot.ngram and policy.prefers_ngrams(slot, plan) else None
            for slot in slots
        )
        return (plan, drafts) if any(drafts) else None

    def _verifying_plan(self) -> Plan | None:
        """Return the next plan of the cycle; None if it verifies no drafts or does not fit."""
        if self.staged_plan in self.cycle.plans and self.staged_plan.drafts:
            plan = self.staged_plan
        else:
            plan = self.cycle.plans[0]
        return plan if plan.drafts and self._fits(plan.width) else None

    def _from_cycle(self) -> NextPass | None:
        """Return a pass with the plan whose windows are on the device, or else with the first plan
        of the cycle. If neither fits, take a narrower cycle; None if not even `ar` fits."""
        cycle = self.cycle
        while True:
            for plan in (self.staged_plan, cycle.plans[0]):
                fits = plan in cycle.plans and self._fits(cycle.reach(plan))
                if plan is not None and fits and self.capabilities.allows(cycle.plans):
                    return plan, (None,) * len(self.slots)
            if cycle.depth == 0:
                return None
            cycle = cycle.narrower()

    def _fits(self, width: int) -> bool:
        return self.capabilities.padded_width(width) <= self.room


def choose_drafts(
    mode: str, max_drafts: int, draft: str | None = None
) -> tuple[str, Cycle | None, int, int]:
    """Return the fields `mode`, `cycle`, `lookahead_drafts` and `ngram_drafts` of a `Request`.

    mode, max_drafts: as for `make_cycle`; mode may also be "auto". draft: one of DRAFT_SOURCES;
    None means "both" for "auto", and "lookahead" for other modes.
    """
    if mode == "auto" and max_drafts:
        lookahead_drafts = 0 if draft == "ngram" else max_drafts
        return "auto", None, lookahead_drafts, 0 if draft == "lookahead" else max_drafts
    cycle = make_cycle("ar" if mode == "auto" else mode, max_drafts)
    if draft in (None, "lookahead") or max_drafts == 0:
        return cycle.name, cycle, cycle.depth, 0
    if mode == "ar":
        raise PassError(
            f"the plan ar takes no drafts, so --draft {draft} needs another one: two-pass, "
            "fused or auto"
        )
    if draft == "ngram":
        return "ngram", make_cycle("ar", 0), 0, cycle.depth
    return f"{cycle.name}+ngram", cycle, cycle.depth, cycle.depth
