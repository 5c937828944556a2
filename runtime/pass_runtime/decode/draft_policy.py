"""Which pass comes next: a mode's cycle of plans, drafts found in the text, and whatever still fits the KV cache.

Nothing here can change the text. Drafts are only compared with what the model chooses by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.base import Backend
from pass_runtime.bundle.plan import Cycle, Plan, make_cycle
from pass_runtime.decode.ngram import NgramIndex
from pass_runtime.errors import PassError

DRAFTS = ("lookahead", "ngram", "both")
"""Where drafts come from: look-ahead rows, the text so far, or the text where it matches and else look-ahead rows."""


@dataclass(frozen=True)
class Pass:
    """A plan and its window: the one that the last tail laid out (`drafts` is None), or one with these drafts."""

    plan: Plan
    drafts: tuple[int, ...] | None


class Steering:
    """The passes of one request. `cycle` is the mode, `text_drafts` the most tokens to draft from the text."""

    def __init__(self, cycle: Cycle, text_drafts: int = 0) -> None:
        self._cycle = cycle
        self._text_drafts = text_drafts
        self._index = NgramIndex()
        self._ready: Plan | None = None
        self.drafted = 0
        """Drafts in the window of the pass that `next` chose."""
        self._left = 0

    @property
    def name(self) -> str:
        """The mode, as statistics call it."""
        if not self._text_drafts:
            return self._cycle.name
        return "ngram" if self._cycle.name == "ar" else f"{self._cycle.name}+ngram"

    @property
    def lookahead(self) -> int:
        """The most drafts of one pass."""
        return max(self._cycle.lookahead, self._text_drafts)

    def begin(self, prompt: Sequence[int]) -> None:
        """The prompt is in; the first pass comes next."""
        if self._text_drafts:
            self._index.extend(prompt)

    def next(self, backend: Backend) -> Pass | None:
        """The next pass, None where not even a plain one fits the capacity."""
        chosen = self._from_text(backend) or self._from_cycle(backend)
        if chosen is not None:
            self.drafted = self._left if chosen.drafts is None else len(chosen.drafts)
        return chosen

    def record(self, plan: Plan, tokens: Sequence[int], seconds: float) -> None:  # noqa: ARG002
        """`plan` was run for `seconds` and emitted `tokens`."""
        self._ready, self._left = plan.next, plan.left(len(tokens) - 1)
        if self._text_drafts:
            self._index.extend(tokens)

    def _from_text(self, backend: Backend) -> Pass | None:
        """A window with drafts from the text: of the fused plan, which leaves the next drafts, or of their number."""
        drafts = self._index.propose(self._text_drafts)
        if not drafts:
            return None
        plan = self._cycle.plans[0]
        if plan.is_fused and backend.fits(plan.width):
            return Pass(plan, drafts[: plan.drafts])
        plans = [backend.capabilities.verify_plan(count) for count in range(1, len(drafts) + 1)]
        room = sum(backend.fits(plan.width) for plan in plans)
        return Pass(plans[room - 1], drafts[:room]) if room else None

    def _from_cycle(self, backend: Backend) -> Pass | None:
        """The window in place, or the start of the cycle; near the end of the capacity a narrower cycle."""
        ready = self._ready
        if ready in self._cycle.plans and backend.fits(ready.width):
            return Pass(ready, None)
        while not (backend.fits(self._cycle.reach) and backend.capabilities.allows(self._cycle.plans)):
            if self._cycle.lookahead == 0:
                return None
            self._cycle = self._cycle.narrower()
        return Pass(self._cycle.plans[0], ())


def make_steering(mode: str, lookahead: int, draft: str | None = None) -> Steering:
    """`mode` and `lookahead` as for `make_cycle`; `draft` is one of DRAFTS (None: "lookahead")."""
    cycle = make_cycle(mode, lookahead)
    if draft in (None, "lookahead") or lookahead == 0:
        return Steering(cycle)
    if mode == "ar":
        raise PassError(f"the plan ar takes no drafts, so --draft {draft} needs another one: two-pass, fused or auto")
    return Steering(make_cycle("ar", 0) if draft == "ngram" else cycle, cycle.lookahead)
