"""How tokens are sampled; `reference` is the definition."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Literal

from pydantic import Field

from pass_runtime.bundle.option import option, options_class, options_of
from pass_runtime.errors import PassError

MIN_TEMPERATURE = 2.0**-100
"""Sampling tails raise lower temperatures to this one: float32 would overflow. A power of two
keeps different logits different."""
MIN_TOP_P = 2.0**-126
"""A lower top_p is argmax, as 0 is: float32 may flush it to 0."""
FORBIDDEN_BIAS = -1e30
"""Infinity would lead to NaNs."""
TOKEN_LIST_SIZES = (16, 128, 1024, 8192, 65536, 524288)
"""Padded lengths of token lists. Each needs CUDA graphs of its own."""
MAX_CANDIDATES = 1024
"""Truncated sampling looks at so many likely tokens."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024

Sampler = Literal["greedy", "sample", "truncated"]
SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")
"""Argmax, a draw from all tokens, or from those that truncation keeps. Each can do what the ones
before do."""
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""A draft is accepted if it equals the model's sample, or with probability min(1, p/q): p the
model's, q its own."""


@options_class
class SamplingParams:
    """How a token is drawn: biases and penalties, then temperature, top-k, top-p and min-p. The
    lower of equal logits' ids wins; tokens as likely as the last of top_k are kept. Without top_k,
    top_p keeps at most MAX_CANDIDATES. Presence and frequency do not count the prompt."""

    temperature: float = option(
        0.0,
        "0 takes the most likely token; higher values make unlikely tokens more likely.",
        ge=0,
        allowed="a number of at least 0",
        tail="sample",
    )
    top_k: int = option(
        0,
        f"Draw from this many of the most likely tokens, at most {MAX_CANDIDATES}. 0 and -1 are "
        "off.",
        ge=-1,
        le=MAX_CANDIDATES,
        allowed=f"0 or -1 (off) to {MAX_CANDIDATES}",
        tail="truncated",
    )
    top_p: float = option(
        1.0,
        "Draw from the most likely tokens that together have this probability. 1 is off, 0 takes "
        "the most likely token.",
        ge=0,
        le=1,
        allowed="0 to 1 (off)",
        tail="truncated",
    )
    seed: int | None = option(
        None,
        "The same seed gives the same text, whatever the plan.",
        ge=0,
        lt=1 << 64,
        allowed="0 to 2^64-1",
        if_none="random",
    )
    min_p: float = option(
        0.0,
        "Remove tokens less likely than this share of the most likely token's probability. 0 is "
        "off.",
        ge=0,
        le=1,
        allowed="0 (off) to 1",
        tail="truncated",
    )
    presence_penalty: float = option(
        0.0,
        "Subtracted from the logit of every token already generated.",
        ge=-2,
        le=2,
        allowed="-2 to 2 (0 is off)",
    )
    frequency_penalty: float = option(
        0.0,
        "Subtracted from a token's logit once for each time it was generated.",
        ge=-2,
        le=2,
        allowed="-2 to 2 (0 is off)",
    )
    repetition_penalty: float = option(
        1.0,
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        ge=0.01,
        le=100,
        allowed="0.01 to 100 (1 is off)",
    )
    logit_bias: Mapping[int, Annotated[float, Field(ge=-100, le=100)]] = field(
        default_factory=dict,
        hash=False,
        metadata={
            "help": "Added to the logit of a token, by token id.",
            "metavar": "TOKEN=BIAS",
            "triton": None,
        },
    )

    def __post_init__(self) -> None:
        if len(self.logit_bias) > MAX_BIASES:
            raise PassError(
                f"logit-bias has {len(self.logit_bias)} tokens; at most {MAX_BIASES} are allowed"
            )
        object.__setattr__(self, "top_k", max(self.top_k, 0))  # the class is frozen

    def resolved(self) -> SamplingParams:
        """Return the parameters with a seed (random, or 0 for argmax), and with temperature 0 in
        place of top_p 0."""
        seed = self.seed
        if seed is None:
            seed = 0 if self.sampler == "greedy" else int.from_bytes(os.urandom(4))
        if self.top_p < MIN_TOP_P:
            return replace(self, temperature=0.0, top_p=1.0, seed=seed)
        return replace(self, seed=seed)

    @property
    def penalizes(self) -> bool:
        added = self.presence_penalty or self.frequency_penalty
        return bool(added) or self.repetition_penalty != 1

    @property
    def sampler(self) -> Sampler:
        """The cheapest one."""
        if self.temperature == 0 or self.top_p < MIN_TOP_P:
            return "greedy"
        truncating = (each for each in TAIL_OPTIONS if each.tail == "truncated")
        is_truncated = any(getattr(self, each.name) != each.default for each in truncating)
        return "truncated" if is_truncated else "sample"


TAIL_OPTIONS = tuple(each for each in options_of(SamplingParams).values() if each.tail)
"""Tail inputs [B]: float32, or int64 for whole numbers."""
