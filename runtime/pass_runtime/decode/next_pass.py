"""Chooses the next pass's window: the plan's, or one for drafts of a grammar or n-grams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pass_runtime.backends.base import Capabilities, Drafts
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.window import MAX_LOOKAHEAD, Window
from pass_runtime.tuning.auto import Choice, Rates, Tuner


class Proposed(NamedTuple):
    """drafts: of a grammar or n-grams. lookahead: the window's own drafts. rates: acceptance in
    its text."""

    drafts: Drafts | None
    lookahead: int = 0
    rates: Rates | None = None


NextPass = tuple[Window, list[Drafts | None]]
"""A window, and each sequence's drafts; None leaves it as it is."""


@dataclass(frozen=True)
class Situation:
    """staged: the device's window. room: tokens that fit after the longest sequence. batch:
    slots. advice: the tuner and its choice; without it, proposed drafts come first."""

    plan: Plan
    staged: Window | None
    room: int
    capabilities: Capabilities
    batch: int = 1
    advice: tuple[Tuner, Choice] | None = None

    def next_pass(self, proposed: Sequence[Proposed]) -> NextPass | None:
        """None if there is no room even for a plain pass."""
        if any(each.drafts for each in proposed) and (verifying := self._verify(proposed)):
            return verifying
        plan = self.plan
        while True:
            for window in (self.staged, plan.windows[0]):
                if (
                    window in plan.windows
                    and self._fits(plan.reach(window))
                    and self.capabilities.allows(plan.windows)
                ):
                    return window, [None] * len(proposed)
            if plan.drafts == 0:
                return None
            plan = plan.narrower()

    def _verify(self, proposed: Sequence[Proposed]) -> NextPass | None:
        """Return a pass that verifies proposed drafts, None if none are better than the plan's
        own. It takes the plan's next window, or one that only verifies if that has no draft
        rows, no room or too few."""
        is_verifying = self.staged in self.plan.windows and self.staged.drafts
        window: Window | None = self.staged if is_verifying else self.plan.windows[0]
        if window is None or not window.drafts or not self._fits(window.width):
            window = None
        longest = max(len(each.drafts.tokens) for each in proposed if each.drafts is not None)
        longest = min(longest, self.capabilities.fixed_lookahead or MAX_LOOKAHEAD)
        if window is None or longest > window.drafts:
            verifying = map(self.capabilities.verify_window, range(1, longest + 1))
            windows = [each for each in verifying if self._fits(each.width)]
            count = self._count(proposed, window, windows)
            if count:
                return windows[count - 1], [_first(each.drafts, count) for each in proposed]
        if window is None:
            return None
        drafts = [
            _first(each.drafts, window.drafts) if self._prefers(each, window) else None
            for each in proposed
        ]
        return (window, drafts) if any(drafts) else None

    def _count(
        self, proposed: Sequence[Proposed], window: Window | None, windows: Sequence[Window]
    ) -> int:
        if self.advice is None:
            return len(windows) if window is None else 0
        tuner, choice = self.advice
        drafts = [(each.drafts, each.rates) for each in proposed]
        return tuner.drafts_to_verify(choice, self.batch, drafts, window, windows)

    def _prefers(self, proposed: Proposed, window: Window) -> bool:
        drafts, lookahead, rates = proposed
        if drafts is None or self.advice is None:
            return drafts is not None
        return self.advice[0].prefers(drafts, rates, window.drafts, lookahead)

    def _fits(self, width: int) -> bool:
        return self.capabilities.padded_width(width) <= self.room


def _first(drafts: Drafts | None, count: int) -> Drafts | None:
    return None if drafts is None else drafts._replace(tokens=drafts.tokens[:count])
