"""Statistics of a generation."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

STATISTICS = (
    *("plan", "lookahead", "prompt_tokens", "cached_tokens", "generated_tokens", "passes", "tau"),
    *("steps", "drafted", "accepted", "mean_acceptance_length", "draft_acceptance_rate"),
    *("acceptance_histogram", "acceptance_per_position", "queue_seconds", "prefill_seconds"),
    *("decode_seconds", "engine_seconds", "decode_tokens_per_second"),
)
"""The order of `Stats.as_dict`."""


@dataclass
class Stats:
    """Of one generation. steps: passes that verified drafts. lookahead: the most drafts of a
    pass, n-grams included. steps_by_accepted, steps_by_drafted: steps by their drafts.
    engine_seconds: of `decode_seconds`, also for other prompts."""

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
    steps_by_drafted: Counter[int] = field(default_factory=Counter)
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    engine_seconds: float = 0.0
    _decoding_since: float | None = None
    _engine_seconds_before: float = 0.0

    def begin(self, engine_seconds: float) -> None:
        self._decoding_since = time.perf_counter()
        self._engine_seconds_before = engine_seconds

    def record(self, drafted: int, emitted: int, engine_seconds: float = 0.0) -> None:
        """Count a pass. emitted: includes tokens after a stop, which are not written."""
        self.engine_seconds = engine_seconds - self._engine_seconds_before
        self.passes += 1
        self.emitted += emitted
        if drafted:
            self.steps += 1
            self.drafted += drafted
            self.accepted += emitted - 1
            self.steps_by_accepted[emitted - 1] += 1
            self.steps_by_drafted[drafted] += 1

    def wrote(self, tokens: int) -> None:
        self.generated_tokens = tokens
        if self._decoding_since is not None:
            self.decode_seconds = time.perf_counter() - self._decoding_since

    @property
    def tau(self) -> float:
        """Tokens per pass, bonus tokens included."""
        return self.emitted / self.passes if self.passes else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps, as in vLLM."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """[L]: the share of all steps in which draft i was accepted."""
        if not self.steps:
            return []
        # another thread may record a pass
        steps = tuple(self.steps_by_accepted.items())
        return [
            sum(times for accepted, times in steps if accepted > i) / self.steps
            for i in range(self.lookahead)
        ]

    @property
    def acceptance_of_tried(self) -> list[float | None]:
        """[L]: the share of the steps with a draft i; None without any."""
        shares: list[float | None] = []
        for i in range(self.lookahead):
            tried = sum(times for drafted, times in self.steps_by_drafted.items() if drafted > i)
            accepted = sum(times for count, times in self.steps_by_accepted.items() if count > i)
            shares.append(accepted / tried if tried else None)
        return shares

    @property
    def acceptance_histogram(self) -> list[int]:
        """[L+1]: the steps that accepted exactly i drafts; empty without steps."""
        return [self.steps_by_accepted[i] for i in range(self.lookahead + 1)] if self.steps else []

    @property
    def host_seconds(self) -> float:
        """`decode_seconds` between passes: scheduling and text."""
        return self.decode_seconds - self.engine_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """From the start of the first pass."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATISTICS}
