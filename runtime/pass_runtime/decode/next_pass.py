"""Chooses the next pass's window: the plan's, or one that verifies a grammar's or n-gram drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pass_runtime.backends.base import Capabilities, Drafts
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.window import Window
from pass_runtime.tuning.auto import Choice, Rates, Tuner

DRAFTS_BY_CONFIDENCE = (0, 2, 4, 4, 8, 16)
"""The n-gram drafts that pay where rows cost time, for plans that a request names."""


class Proposed(NamedTuple):
    """drafts: of a grammar or n-grams. staged: how many drafts the window on the device has.
    rates: acceptance in its text."""

    drafts: Drafts | None
    staged: int = 0
    rates: Rates | None = None


NextPass = tuple[Window, list[Drafts | None]]
"""A window, and each sequence's drafts; None leaves it as it is."""


@dataclass(frozen=True)
class Situation:
    """staged: the device's window. room: tokens that fit after the longest sequence. batch:
    slots. advice: the tuner and its choice of a plan."""

    plan: Plan
    staged: Window | None
    room: int
    capabilities: Capabilities
    batch: int = 1
    advice: tuple[Tuner, Choice] | None = None

    def next_pass(self, proposed: Sequence[Proposed]) -> NextPass | None:
        """None if there is no room even for a plain pass."""
        window = self._next_of_plan()
        if window is None:
            return None
        if any(each.drafts for each in proposed):
            fitting = [each for each in self.capabilities.verifying if self._fits(each.width)]
            verifying = self._verifying(proposed, window, fitting)
            if verifying is not None:
                return verifying, [_first(each.drafts, verifying.drafts) for each in proposed]
        return window, [
            _first(each.drafts, window.drafts) if self._prefers_proposed(each, window) else None
            for each in proposed
        ]

    def _next_of_plan(self) -> Window | None:
        plan = self.plan
        while True:
            for window in (self.staged, plan.windows[0]):
                if (
                    window in plan.windows
                    and self._fits(plan.reach(window))
                    and self.capabilities.allows(plan.windows)
                ):
                    return window
            if plan.drafts == 0:
                return None
            plan = plan.narrower()

    def _verifying(
        self, proposed: Sequence[Proposed], next_of_plan: Window, fitting: Sequence[Window]
    ) -> Window | None:
        """Return the best of `fitting`, or None if the plan's next window is as good."""
        if self.advice is not None:
            tuner, choice = self.advice
            drafts = [(each.drafts, each.rates) for each in proposed]
            return tuner.verifying(choice, self.batch, drafts, next_of_plan, fitting)
        most = max(_worth_drafting(each.drafts) for each in proposed)
        wider = [each for each in fitting if each.drafts > next_of_plan.drafts]
        if most <= next_of_plan.drafts or not wider:
            return None
        return next((each for each in wider if each.drafts >= most), wider[-1])

    def _prefers_proposed(self, proposed: Proposed, window: Window) -> bool:
        drafts, staged, rates = proposed
        if drafts is None or not window.drafts:
            return False
        if self.advice is None:
            return _worth_drafting(drafts) > 0
        return self.advice[0].prefers(drafts, rates, window.drafts, staged)

    def _fits(self, width: int) -> bool:
        return self.capabilities.padded_width(width) <= self.room


def _worth_drafting(drafts: Drafts | None) -> int:
    if drafts is None:
        return 0
    if drafts.source == "grammar":
        return len(drafts.tokens)
    return min(len(drafts.tokens), DRAFTS_BY_CONFIDENCE[drafts.confidence])


def _first(drafts: Drafts | None, count: int) -> Drafts | None:
    return None if drafts is None else drafts._replace(tokens=drafts.tokens[:count])
