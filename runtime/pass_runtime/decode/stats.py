"""Statistics of a generation, by the definitions of vLLM and AIPerf."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STATISTICS = (
    *("plan", "lookahead", "prompt_tokens", "cached_tokens", "generated_tokens", "passes", "tau"),
    *("steps", "drafted", "accepted", "mean_acceptance_length", "draft_acceptance_rate"),
    *("acceptance_histogram", "acceptance_per_position", "queue_seconds", "prefill_seconds"),
    *("decode_seconds", "engine_seconds", "decode_tokens_per_second"),
)
"""The statistics in JSON, in this order."""


@dataclass
class Stats:
    """Counts of one generation. passes: all of them. steps: those that verified drafts. lookahead:
    the most drafts of a pass, n-gram drafts included."""

    plan: str = "ar"
    lookahead: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    passes: int = 0
    emitted: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    steps_by_accepted: Counter[int] = field(default_factory=Counter)
    """Steps, by the drafts that they accepted."""
    steps_by_drafted: Counter[int] = field(default_factory=Counter)
    """Steps, by the drafts that they verified."""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine_seconds: float = 0.0
    """The part of `decode_seconds` in which the backend ran passes, prefill of other sequences
    included."""

    def record(self, drafted: int, count: int) -> None:
        """Count a pass that verified `drafted` drafts (of a tree: its depth) and emitted `count`
        tokens, those after a stop or the limit included."""
        self.passes += 1
        self.emitted += count
        if drafted:
            self.steps += 1
            self.drafted += drafted
            self.accepted += count - 1
            self.steps_by_accepted[count - 1] += 1
            self.steps_by_drafted[drafted] += 1

    @property
    def tau(self) -> float:
        """Tokens emitted per pass, bonus tokens included. Passes that verify no drafts count,
        too."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the bonus token included: 1 + accepted / steps (vLLM's
        definition)."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """[L]: the fraction of steps in which draft i was accepted, for i = 1..L (it never rises
        with i)."""
        if not self.steps:
            return []
        steps = tuple(self.steps_by_accepted.items())
        return [
            sum(times for accepted, times in steps if accepted > i) / self.steps
            for i in range(self.lookahead)
        ]

    @property
    def acceptance_of_tried(self) -> list[float | None]:
        """[L]: the fraction of the steps that verified draft i in which it was accepted; None if no
        step did."""
        found: list[float | None] = []
        for i in range(self.lookahead):
            tried = sum(times for drafted, times in self.steps_by_drafted.items() if drafted > i)
            accepted = sum(times for count, times in self.steps_by_accepted.items() if count > i)
            found.append(accepted / tried if tried else None)
        return found

    @property
    def acceptance_histogram(self) -> list[int]:
        """[L+1]: steps that accepted exactly 0..L drafts."""
        return [self.steps_by_accepted[i] for i in range(self.lookahead + 1)] if self.steps else []

    @property
    def host_seconds(self) -> float:
        """The part of `decode_seconds` between passes: scheduling, and finding text and stop
        strings."""
        return self.decode_seconds - self.engine_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens / seconds from the start of the first pass to the last token."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Every statistic, for JSON."""
        return {name: getattr(self, name) for name in STATISTICS}
