"""Sampling parameters, and which tail computes them. (`pass_runtime.bundle.reference` says what they mean.)"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Literal

from pass_runtime.errors import PassError

MAX_CANDIDATES = 1024
"""Truncated sampling looks at this many of the most likely tokens; `top_k` is at most this."""

MIN_TEMPERATURE = 2.0**-100
"""Lower temperatures are taken as this one, so that float32 does not overflow. A power of two: dividing by it makes no
two logits equal, so a tail that samples can serve temperature 0 exactly."""

MAX_LOGPROBS = 20
"""How many of the most likely tokens can be reported beside the one that was written."""

Sampler = Literal["greedy", "sample", "truncated"]
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""How a draft is accepted: where it equals the model's own sample, or with probability min(1, p/q)."""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: temperature, then top-k, then top-p, then min-p, in Hugging Face's order.

    temperature: 0 is argmax (the lower id wins a tie). top_k: 0 is off. top_p: 1 is off; without top_k, the
    nucleus is taken among the MAX_CANDIDATES most likely tokens. Tokens as likely as the last one kept are kept too.
    seed: 64 bits; with it a token is a pure function of logits and position. None is one that nobody knows beforehand.
    min_p: 0 is off; tokens less likely than this share of the most likely one's probability are removed.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise PassError(f"temperature must be a number of at least 0, not {self.temperature}")
        if not 0 <= self.top_k <= MAX_CANDIDATES:
            raise PassError(f"top-k must be 0 (off) to {MAX_CANDIDATES}, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise PassError(f"top-p must be above 0 and at most 1 (off), not {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 1 << 64:
            raise PassError(f"seed must be 0 to 2^64-1, not {self.seed}")
        if not 0 <= self.min_p <= 1:
            raise PassError(f"min-p must be 0 (off) to 1, not {self.min_p}")

    def seeded(self) -> SamplingParams:
        """With a seed from the system where none was given; argmax has no use for one."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4)) if self.temperature else 0)

    @property
    def sampler(self) -> Sampler:
        """The cheapest tail that computes these parameters."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_k or self.top_p < 1 or self.min_p else "sample"
