"""Which pass comes next: the next plan of the cycle, or a plan that verifies n-gram drafts.

Nothing here can change the text: the model verifies every draft.
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
of them is run only if its expected rate is at least this many times the cycle's."""

NextPass = tuple[Plan, tuple[tuple[int, ...] | None, ...]]
"""A plan, and for every slot the n-gram drafts to put into its window; None keeps the window of the
last pass."""


class DraftPolicy:
    """Which n-gram drafts to verify: all of them, for requests that name a plan."""

    def prefers_ngrams(self, slot: Slot, plan: Plan) -> bool:  # noqa: ARG002
        """Whether a slot's n-gram drafts are better than those in its window of `plan`."""
        return True

    def ngram_count(
        self,
        slots: Sequence[Slot],  # noqa: ARG002
        next_plan: Plan | None,
        plans: Sequence[Plan],
    ) -> int:
        """Return how many n-gram drafts of each slot to verify in a separate pass; 0: no such pass.

        plans: plans[i] verifies i + 1 drafts. next_plan: the next plan of the cycle, if it can
        verify drafts.
        """
        return len(plans) if next_plan is None else 0


class ExpectedRate(DraftPolicy):
    """Verifies n-gram drafts if that promises more tokens per second than `candidate` does."""

    def __init__(self, tuner: Tuner, candidate: Candidate, batch: int) -> None:
        self._tuner, self._candidate, self._batch = tuner, candidate, batch

    def prefers_ngrams(self, slot: Slot, plan: Plan) -> bool:
        ngram = cumulative_acceptance(self._acceptance(slot).rates)[1 : plan.depth + 1]
        window = cumulative_acceptance(self._tuner.lookahead_acceptance.rates)[
            1 : slot.num_drafts + 1
        ]
        return float(ngram.sum()) > float(window.sum())

    def ngram_count(
        self, slots: Sequence[Slot], next_plan: Plan | None, plans: Sequence[Plan]
    ) -> int:
        best, count = self._best(slots, plans)
        rate = self._candidate.rate * len(slots)
        if next_plan is not None:
            return count if count > next_plan.depth and best >= NGRAM_MARGIN * rate else 0
        if best >= SWITCH_MARGIN * rate:
            return count
        for slot in slots:
            # The drafts are not verified now, but must be tried again later.
            if slot.ngram:
                for acceptance in (self._acceptance(slot), self._tuner.ngram(slot.match_length)):
                    acceptance.forget()
        return 0

    def _acceptance(self, slot: Slot) -> ConditionalAcceptance:
        return self._tuner.ngram(slot.match_length, slot.current.ngram_acceptance)

    def _best(self, slots: Sequence[Slot], plans: Sequence[Plan]) -> tuple[float, int]:
        """Return the highest expected tokens per second of `plans` (plans[i] verifies i + 1 n-gram
        drafts), and how many drafts that plan verifies."""
        matching = [
            (cumulative_acceptance(self._acceptance(s).rates), len(s.ngram))
            for s in slots
            if s.ngram
        ]
        rates = []
        for drafts, plan in enumerate(plans, 1):
            tokens = sum(
                cumulative[: min(drafts, proposed) + 1].sum() for cumulative, proposed in matching
            )
            tokens += len(slots) - len(matching)  # one token for each sequence without a match
            rates.append(float(tokens) / self._tuner.plan_seconds(plan, self._batch))
        best = max(rates, default=0.0)
        return best, rates.index(best) + 1 if rates else 0


@dataclass(frozen=True)
class Situation:
    """What decides about the next pass over the sequences in `slots`.

    staged_plan: the plan of the windows on the device, if there are any. room: tokens of KV
    capacity left after the longest sequence.
    """

    cycle: Cycle
    staged_plan: Plan | None
    room: int
    capabilities: Capabilities
    slots: Sequence[Slot]
    policy: DraftPolicy

    def next_pass(self) -> NextPass | None:
        """Return the next pass; None if not even a plain one fits."""
        found = self._with_ngrams() if any(slot.ngram for slot in self.slots) else None
        return found or self._from_cycle()

    def _with_ngrams(self) -> NextPass | None:
        """Return a pass that verifies n-gram drafts; None if the policy wants none. Its plan is the
        next one of the cycle, or a plan that only verifies, if the next one of the cycle has no
        draft rows, does not fit, or verifies fewer drafts than the policy wants."""
        slots, policy, plan = self.slots, self.policy, self._verifying_plan()
        limit = self.capabilities.fixed_lookahead or MAX_LOOKAHEAD
        longest = min(max(len(slot.ngram) for slot in slots), limit)
        if plan is None or longest > plan.depth:
            verifying = [self.capabilities.verify_plan(count) for count in range(1, longest + 1)]
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
        """Return the next plan of the cycle, if it verifies drafts and fits."""
        if self.staged_plan in self.cycle.plans and self.staged_plan.drafts:
            plan = self.staged_plan
        else:
            plan = self.cycle.plans[0]
        return plan if plan.drafts and self._fits(plan.width) else None

    def _from_cycle(self) -> NextPass | None:
        """Return a pass with the plan whose windows are on the device, or else with the first plan
        of the cycle. If neither fits, take a narrower cycle; None if not even a plain pass fits."""
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
    """The fields `mode`, `cycle`, `lookahead_drafts` and `ngram_drafts` of a `Request`.

    mode, max_drafts: as for `make_cycle`; mode may also be "auto". draft: one of DRAFT_SOURCES
    (None: "both" for auto, else "lookahead").
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
