"""Sampling parameters, whose effect `pass_runtime.bundle.reference` defines."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pass_runtime.bundle.request_fields import SAMPLING_FIELDS

MIN_TEMPERATURE = 2.0**-100
"""Lower temperatures are raised to this one, so that float32 does not overflow. Dividing by a power
of two keeps different logits different, so a sampling tail is exact for the requests of temperature
0 in its batch, too."""

FORBIDDEN_BIAS = -1e30
"""Added to the logit of a token that may not be drawn; finite, because infinities lead to NaNs."""

TOKEN_LIST_SIZES = (16, 128, 1024, 8192, 65536, 524288)
"""The lengths to which logits processors' token lists are padded: few, because each length needs
CUDA graphs of its own."""

Sampler = Literal["greedy", "sample", "truncated"]
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""How a draft is accepted: if it equals the model's own sample ("match"), or with probability
min(1, p/q), p being the model's and q the draft's probability ("rejection")."""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")
"""Take the argmax, draw from all tokens, or draw from those that truncation keeps. A later sampler
can also do what the earlier ones do."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: bias and penalties, then temperature, then top-k, then top-p,
    then min-p, in Hugging Face's order.

    The table `request_fields.SAMPLING_FIELDS` says what each field does and which values it may
    have. temperature 0 is argmax, and of equal logits the lower id wins. Tokens as likely as the
    last one that top_k keeps are kept, too. Without top_k, top_p keeps at most the MAX_CANDIDATES
    most likely tokens. seed has 64 bits, and with it a token is a pure function of logits and
    position; None takes a random seed. Tokens of the prompt do not count for presence_penalty and
    frequency_penalty.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for each in SAMPLING_FIELDS:
            value = each.checked(getattr(self, each.name))
            object.__setattr__(self, each.name, value)  # the class is frozen

    def seeded(self) -> SamplingParams:
        """Return these parameters with a seed: if it is None, a random one, or 0 for argmax, which
        does not use it."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4)) if self.temperature else 0)

    @property
    def penalizes(self) -> bool:
        """Whether there are penalties, which depend on the tokens before; biases do not."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties or biases."""
        return bool(self.logit_bias) or self.penalizes

    @property
    def sampler(self) -> Sampler:
        """The cheapest tail that can sample with these parameters."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_k or self.top_p < 1 or self.min_p else "sample"
