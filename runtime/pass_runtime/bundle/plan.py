"""Plans, which `--plan` names: the windows that the passes of a sequence use in turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pass_runtime.bundle.window import (
    Window,
    ar_window,
    draft_window,
    fused_window,
    verify_window,
)
from pass_runtime.errors import PassError

PLAN_NAMES = ("ar", "two-pass", "fused")
"""Plans of any number of drafts; `fused:` lists its group sizes instead."""


@dataclass(frozen=True)
class Plan:
    name: str
    windows: tuple[Window, ...]

    @property
    def drafts(self) -> int:
        """The most drafts that one pass can accept."""
        return max(window.drafts for window in self.windows)

    def reach(self, first: Window) -> int:
        """Return the cache entries that passes from `first` to the last window need if no draft
        is accepted."""
        passes = self.windows[self.windows.index(first) :]
        return max(i + window.width for i, window in enumerate(passes))

    def narrower(self) -> Plan:
        """Return the plan with one draft less, or `ar`."""
        drafts = self.drafts - 1
        if drafts < 1 or self.name in PLAN_NAMES:
            return make_plan(self.name, max(drafts, 0))
        return fused_plan([min(size, drafts) for size in self.windows[0].groups[:-1]])


def make_plan(name: str, lookahead: int) -> Plan:
    """name: one of PLAN_NAMES, or `fused:` and the size of every group; else raises PassError.
    lookahead: the drafts; 0 gives `ar`."""
    if not name.startswith("fused:") and name not in PLAN_NAMES:
        raise PassError(
            f"unknown plan {name!r}: choose one of {', '.join(PLAN_NAMES)}, auto, or group sizes "
            "as in fused:4,3,2,2,1"
        )
    if name == "ar" or lookahead == 0:
        return Plan("ar", (ar_window(),))
    if name.startswith("fused:"):
        return fused_plan(_sizes(name))
    if name == "fused":
        return fused_plan([lookahead] * (lookahead + 1))
    return Plan(name, (draft_window(lookahead), verify_window(lookahead)))


def plan_windows(lookahead: int, verifying: Iterable[Window] = ()) -> list[Window]:
    """Return the windows of PLAN_NAMES with `lookahead` drafts, each once, then those of
    `verifying` with more."""
    windows = (w for name in PLAN_NAMES for w in make_plan(name, lookahead).windows)
    copying = (window for window in verifying if window.drafts > lookahead)
    return [*dict.fromkeys(windows), *copying]


def fused_plan(groups: Sequence[int]) -> Plan:
    window = fused_window(groups)
    all_full = window.name == window.tail  # The name then has no group sizes.
    return Plan("fused" if all_full else window.name, (window,))


def _sizes(name: str) -> list[int]:
    try:
        return [int(size) for size in name.removeprefix("fused:").split(",")]
    except ValueError:
        raise PassError(f"{name} must list group sizes, as in fused:4,3,2,2,1") from None
