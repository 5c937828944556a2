"""Sampling parameters, and which tail computes them. `pass_runtime.bundle.reference` defines what they do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from pass_runtime.bundle.values import number, shown, whole
from pass_runtime.errors import PassError

MAX_CANDIDATES = 1024
"""Truncated sampling looks at this many of the most likely tokens; `top_k` is at most this."""

MIN_TEMPERATURE = 2.0**-100
"""Lower temperatures are raised to this one, so that float32 does not overflow. Dividing by a power of two makes no two
logits equal, so a sampling tail serves temperature 0 exactly."""

MAX_LOGPROBS = 20
"""How many of the most likely tokens can be reported along with the one that was written."""

MAX_BIASES = 1024
"""The most tokens that `logit_bias` may have."""

FORBIDDEN = -1e30
"""What is added to the logit of a token that may not be drawn. It is finite, because infinities make NaNs."""

LIST_SIZES = (16, 128, 1024, 8192, 65536, 524288)
"""The lengths that a list of tokens with changed logits may have in memory: few, as captured graphs hold them."""

MIN_REPETITION = 0.01
"""The least `repetition_penalty`; one over it is the largest."""

Sampler = Literal["greedy", "sample", "truncated"]
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""How a draft is accepted: by the exact-match rule where it equals the model's own sample, or by the rejection rule
with probability min(1, p/q)."""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: bias and penalties, then temperature, then top-k, then top-p, then min-p, in Hugging
    Face's order.

    temperature: 0 is argmax, where the lower id wins a tie.
    top_k: 0 is off. Ties with the last token kept are kept too.
    top_p: 1 is off. Without top_k, the nucleus is taken among the MAX_CANDIDATES most likely tokens.
    seed: 64 bits, with which a token is a pure function of logits and position. None takes a random seed.
    min_p: 0 is off. Tokens less likely than this share of the most likely token's probability are removed.
    presence_penalty, frequency_penalty: -2 to 2, 0 is off. What is taken off the logit of a token that the text written
    so far has, once, and for every time it has it. The prompt does not count.
    repetition_penalty: 1 is off. What the logit of a token in the prompt or the text is divided by where it is above 0,
    and multiplied by elsewhere.
    logit_bias: what is added to the logit of a token, by token id; -100 to 100, at most MAX_BIASES tokens.
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
        self._check_types()
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
        self._check_penalties()

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= (value := getattr(self, name)) <= 2:
                raise PassError(f"{name.replace('_', '-')} must be -2 to 2 (0 is off), not {value}")
        if not MIN_REPETITION <= self.repetition_penalty <= 1 / MIN_REPETITION:
            raise PassError(
                f"repetition-penalty must be {MIN_REPETITION} to {1 / MIN_REPETITION:.0f} (1 is off), not "
                f"{self.repetition_penalty}"
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise PassError(f"logit-bias has {len(self.logit_bias)} tokens; at most {MAX_BIASES} are allowed")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise PassError(f"logit-bias must be -100 to 100, not {bias} for token {token}")

    def _check_types(self) -> None:
        keep = partial(object.__setattr__, self)  # A frozen dataclass can set its own fields only like this.
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            keep(name, number(name.replace("_", "-"), getattr(self, name)))
        keep("top_k", whole("top-k", self.top_k))
        if not isinstance(self.logit_bias, Mapping):
            raise PassError(f"logit-bias must be a mapping from token ids to numbers, not {shown(self.logit_bias)}")
        biases = {whole("a token of logit-bias", t): number("logit-bias", b) for t, b in self.logit_bias.items()}
        keep("logit_bias", biases)
        if self.seed is not None:
            keep("seed", whole("seed", self.seed))

    def seeded(self) -> SamplingParams:
        """These parameters with a seed: a random one where none was given, and 0 for argmax, which needs none."""
        if self.seed is not None:
            return self
        return replace(self, seed=int.from_bytes(os.urandom(4)) if self.temperature else 0)

    @property
    def penalizes(self) -> bool:
        """Whether there are penalties or biases."""
        off = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1)
        return bool(self.logit_bias) or not off

    @property
    def sampler(self) -> Sampler:
        """The cheapest tail that computes these parameters."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_k or self.top_p < 1 or self.min_p else "sample"
