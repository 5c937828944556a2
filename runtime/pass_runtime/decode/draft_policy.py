"""Which pass comes next: a mode's cycle of plans, drafts found in the text, and whatever still fits the KV cache.

Pure functions of numbers. Nothing here can change the text: drafts are only compared with what the model chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pass_runtime.backends.capabilities import Capabilities
from pass_runtime.bundle.plan import MAX_LOOKAHEAD, Cycle, Plan, make_cycle
from pass_runtime.errors import PassError
from pass_runtime.tuning.group_sizes import chain_of
from pass_runtime.tuning.tuner import ADVANTAGE, KEEP, Candidate, PlanTuner

DRAFTS = ("lookahead", "ngram", "both")
"""Where drafts come from: look-ahead rows, the text so far, or the text where it matches and else look-ahead rows."""


@dataclass(frozen=True)
class Mode:
    """How a request is decoded: `cycle` (None: whatever is fastest), at most `lookahead` drafts from look-ahead rows
    and `text_drafts` from the text. name: as statistics call it."""

    name: str
    cycle: Cycle | None
    lookahead: int
    text_drafts: int


@dataclass(frozen=True)
class View:
    """What is known of one sequence: the drafts that the last pass `left` in its window, and what followed the last
    time in the `text`, after `matched` tokens that agree."""

    left: int = 0
    text: tuple[int, ...] = ()
    matched: int = 0


@dataclass(frozen=True)
class Pass:
    """A plan, and drafts from the text for every sequence; None leaves its window as the last pass left it."""

    plan: Plan
    drafts: tuple[tuple[int, ...] | None, ...]


class Judge(Protocol):
    """Whether drafts from the text are worth their pass."""

    def prefers(self, view: View, plan: Plan) -> bool:
        """Whether its text drafts are better than those in its window of `plan`."""

    def count(self, views: Sequence[View], window: Plan | None, plans: Sequence[Plan]) -> int:
        """How many text drafts to verify now; plans[i] would verify i + 1 of them. 0 for none.

        window: a plan that takes some of them too, so that others must be clearly better; None where there is none.
        """


class Always:
    """What a match proposes is always tried."""

    def prefers(self, view: View, plan: Plan) -> bool:  # noqa: ARG002
        return True

    def count(self, views: Sequence[View], window: Plan | None, plans: Sequence[Plan]) -> int:  # noqa: ARG002
        return len(plans) if window is None else 0


class Expected:
    """Tried where they promise more tokens per second than `decided` does without them."""

    def __init__(self, tuner: PlanTuner, decided: Candidate, batch: int) -> None:
        self._tuner, self._decided, self._batch = tuner, decided, batch

    def prefers(self, view: View, plan: Plan) -> bool:
        text = chain_of(self._tuner.text(view.matched).rates)[1 : plan.drafts + 1]
        rows = chain_of(self._tuner.drafts.rates)[1 : view.left + 1]
        return float(text.sum()) > float(rows.sum())

    def count(self, views: Sequence[View], window: Plan | None, plans: Sequence[Plan]) -> int:
        best, count = self._best(views, plans)
        decided = self._decided.rate * len(views)
        if window is not None:
            return count if count > window.drafts and best >= ADVANTAGE * decided else 0
        if best >= KEEP * decided:
            return count
        for view in views:
            if view.text:
                self._tuner.text(view.matched).forget()
        return 0

    def _best(self, views: Sequence[View], plans: Sequence[Plan]) -> tuple[float, int]:
        """The most tokens per second that one of `plans`, of 1, 2, ... text drafts, promises, and how many it has."""
        chains = [chain_of(self._tuner.text(view.matched).rates) for view in views if view.text]
        texts = [view.text for view in views if view.text]
        rates = []
        for drafts, plan in enumerate(plans, 1):
            tokens = sum(chain[: min(drafts, len(text)) + 1].sum() for chain, text in zip(chains, texts, strict=True))
            tokens += len(views) - len(texts)  # one each for the others
            rates.append(float(tokens) / self._tuner.plan_seconds(plan, self._batch))
        best = max(rates, default=0.0)
        return best, rates.index(best) + 1 if rates else 0


def next_pass(
    cycle: Cycle, window: Plan | None, room: int, capabilities: Capabilities, views: Sequence[View], judge: Judge
) -> Pass | None:
    """The next pass over the sequences of `views`, None where not even a plain one fits.

    window: the plan whose windows are in place. room: cache columns behind the longest sequence.
    """
    found = _from_text(cycle, window, room, capabilities, views, judge) if any(view.text for view in views) else None
    return found or _from_cycle(cycle, window, room, capabilities, len(views))


def _from_text(
    cycle: Cycle, window: Plan | None, room: int, capabilities: Capabilities, views: Sequence[View], judge: Judge
) -> Pass | None:
    """Text drafts in the window that has drafts anyway, unless more of them promise more; else in a window of their
    number in place of the cycle's next."""
    first = cycle.plans[0]
    plan = window if window in cycle.plans and window.drafts else first if first.is_fused else None
    if plan is not None and capabilities.columns(plan.width) > room:
        plan = None
    longest = min(max(len(view.text) for view in views), capabilities.lookahead or MAX_LOOKAHEAD)
    if plan is None or longest > plan.drafts:
        chains = [capabilities.verify_plan(count) for count in range(1, longest + 1)]
        plans = [chain for chain in chains if capabilities.columns(chain.width) <= room]
        if count := judge.count(views, plan, plans):
            return Pass(plans[count - 1], tuple(view.text[:count] or None for view in views))
    if plan is None:
        return None
    drafts = [view.text[: plan.drafts] if view.text and judge.prefers(view, plan) else None for view in views]
    return Pass(plan, tuple(drafts)) if any(drafts) else None


def _from_cycle(cycle: Cycle, window: Plan | None, room: int, capabilities: Capabilities, count: int) -> Pass | None:
    """The windows in place, or the start of the cycle; near the end of the capacity those of a narrower cycle."""
    untouched = (None,) * count
    while True:
        for plan in (window, cycle.plans[0]):
            fits = plan in cycle.plans and capabilities.columns(cycle.reach(plan)) <= room
            if plan is not None and fits and capabilities.allows(cycle.plans):
                return Pass(plan, untouched)
        if cycle.lookahead == 0:
            return None
        cycle = cycle.narrower()


def make_mode(plan: str, lookahead: int, draft: str | None = None) -> Mode:
    """`plan` and `lookahead` as for `make_cycle`, or "auto"; `draft` is one of DRAFTS (None: "both" for auto, else
    "lookahead")."""
    if plan == "auto" and lookahead:
        draft = draft or "both"
        return Mode("auto", None, 0 if draft == "ngram" else lookahead, 0 if draft == "lookahead" else lookahead)
    cycle = make_cycle("ar" if plan == "auto" else plan, lookahead)
    if draft in (None, "lookahead") or lookahead == 0:
        return Mode(cycle.name, cycle, cycle.lookahead, 0)
    if plan == "ar":
        raise PassError(f"the plan ar takes no drafts, so --draft {draft} needs another one: two-pass, fused or auto")
    if draft == "ngram":
        return Mode("ngram", make_cycle("ar", 0), 0, cycle.lookahead)
    return Mode(f"{cycle.name}+ngram", cycle, cycle.lookahead, cycle.lookahead)
