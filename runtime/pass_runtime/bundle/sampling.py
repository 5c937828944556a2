"""The parameters with which tokens are sampled. `reference` defines how a token is drawn with them,
and `pass_exporter.tails.definitions` what biases and penalties do before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pass_runtime.bundle.request_fields import SAMPLING_FIELDS

MIN_TEMPERATURE = 2.0**-100
"""Lower temperatures, 0 too, are raised to this one in a tail that samples, so that float32 does
not overflow. Dividing by a power of two keeps different logits different, so such a tail gives
requests with temperature 0 their argmax."""

MIN_TOP_P = 2.0**-126
"""A lower top_p takes the most likely token, as 0 does: float32 may flush it to 0."""

FORBIDDEN_BIAS = -1e30
"""Added to the logit of a token that may not be drawn. Finite: infinities would lead to NaNs."""

TOKEN_LIST_SIZES = (16, 128, 1024, 8192, 65536, 524288)
"""The values of T, the length to which the logits processors' lists of tokens are padded. There are
few, because each needs CUDA graphs of its own."""

Sampler = Literal["greedy", "sample", "truncated"]
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""A draft is accepted if it equals the model's own sample ("match"), or with probability min(1,
p/q) ("rejection"): p is the draft's probability by the model, q the one with which it was drawn."""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")
"""The samplers that tails have: "greedy" takes the argmax, "sample" draws from all tokens,
"truncated" from those that truncation keeps. Each can also do what the ones before it do."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: bias and penalties, then temperature, then top-k, then top-p,
    then min-p, in Hugging Face's order.

    The table `request_fields.SAMPLING_FIELDS` says what each field does and which values it may
    have. temperature 0 and top_p 0 are argmax, and of equal logits the lower id wins. top_k -1
    becomes 0. Tokens as likely as the last one that top_k keeps are kept, too. Without top_k, top_p
    keeps at most the MAX_CANDIDATES most likely tokens. seed has 64 bits, and with a seed a token
    depends on logits and position alone; None takes a random seed. presence_penalty and
    frequency_penalty do not count the prompt's tokens.
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
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    def resolved(self) -> SamplingParams:
        """Return the parameters as engines take them: with a seed in place of None (a random one,
        or 0 for argmax), and with temperature 0 in place of top_p 0."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.sampler == "greedy" else int.from_bytes(os.urandom(4))
        if self.top_p < MIN_TOP_P:
            return replace(self, temperature=0.0, top_p=1.0, seed=seed)
        return replace(self, seed=seed)

    @property
    def penalizes(self) -> bool:
        """Whether there are penalties, which depend on the tokens so far (biases do not)."""
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @property
    def changes_logits(self) -> bool:
        """Whether there are penalties or biases."""
        return bool(self.logit_bias) or self.penalizes

    @property
    def sampler(self) -> Sampler:
        """The cheapest sampler for these parameters."""
        if self.temperature == 0 or self.top_p < MIN_TOP_P:
            return "greedy"
        return "truncated" if self.top_k or self.top_p < 1 or self.min_p else "sample"
