"""Statistics of a generation. Names and definitions are those of vLLM and AIPerf."""

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
"""The statistics that `Stats.as_dict` has, in this order."""


@dataclass
class Stats:
    """Counts and times of one generation. passes: all passes over its sequence. steps: the passes
    that verified drafts. lookahead: L, the most drafts of a pass, n-gram drafts included."""

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
    """How many steps accepted 0, 1, 2, ... drafts."""
    steps_by_drafted: Counter[int] = field(default_factory=Counter)
    """How many steps verified 1, 2, 3, ... drafts."""
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine_seconds: float = 0.0
    """The part of `decode_seconds` in which the backend ran passes or prefilled other sequences."""

    def record(self, drafted: int, emitted: int) -> None:
        """Count a pass that verified `drafted` drafts, or a tree of that depth, and emitted so many
        tokens, including tokens after a stop or the limit, which are not written."""
        self.passes += 1
        self.emitted += emitted
        if drafted:
            self.steps += 1
            self.drafted += drafted
            self.accepted += emitted - 1
            self.steps_by_accepted[emitted - 1] += 1
            self.steps_by_drafted[drafted] += 1

    @property
    def tau(self) -> float:
        """Tokens emitted per pass, bonus tokens included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per step, the bonus token included: 1 + accepted / steps, as in vLLM."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """The share of drafts that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """[L]: for i = 1 to L, the share of all steps in which draft i was accepted."""
        if not self.steps:
            return []
        # a copy, as another thread may be recording a pass
        steps = tuple(self.steps_by_accepted.items())
        return [
            sum(times for accepted, times in steps if accepted > i) / self.steps
            for i in range(self.lookahead)
        ]

    @property
    def acceptance_of_tried(self) -> list[float | None]:
        """[L]: the share of the steps with a draft i in which it was accepted; None if none had."""
        shares: list[float | None] = []
        for i in range(self.lookahead):
            tried = sum(times for drafted, times in self.steps_by_drafted.items() if drafted > i)
            accepted = sum(times for count, times in self.steps_by_accepted.items() if count > i)
            shares.append(accepted / tried if tried else None)
        return shares

    @property
    def acceptance_histogram(self) -> list[int]:
        """[L+1]: how many steps accepted exactly 0, 1, ..., L drafts; empty without steps."""
        return [self.steps_by_accepted[i] for i in range(self.lookahead + 1)] if self.steps else []

    @property
    def host_seconds(self) -> float:
        """The part of `decode_seconds` between passes, mostly for scheduling and for text."""
        return self.decode_seconds - self.engine_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second, from the start of the first pass to the last token."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return every statistic by its name, for JSON."""
        return {name: getattr(self, name) for name in STATISTICS}
