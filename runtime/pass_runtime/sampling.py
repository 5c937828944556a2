"""Sampling parameters, and the sampler in numpy: the definition that the tail graphs are tested against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pass_runtime import noise
from pass_runtime.errors import PassError

MAX_CANDIDATES = 1024
"""Truncated sampling looks at this many of the most likely tokens; `top_k` is at most this."""

MIN_TEMPERATURE = 1e-30
"""Lower temperatures, 0 apart, are taken as this one, so that float32 does not overflow."""

Sampler = Literal["greedy", "sample", "truncated"]
Rule = Literal["match", "rejection"]
RULES: tuple[Rule, ...] = ("match", "rejection")
"""How a draft is accepted: where it equals the model's own sample, or with probability min(1, p/q)."""

SAMPLERS: tuple[Sampler, ...] = ("greedy", "sample", "truncated")


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn: temperature, then top-k, then top-p, in Hugging Face's order.

    temperature: 0 is argmax (the lower id wins a tie). top_k: 0 is off. top_p: 1 is off; without top_k, the
    nucleus is taken among the MAX_CANDIDATES most likely tokens. seed: 64 bits; with it a token is a pure
    function of logits and position.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise PassError(f"temperature must be a number of at least 0, not {self.temperature}")
        if not 0 <= self.top_k <= MAX_CANDIDATES:
            raise PassError(f"top-k must be 0 (off) to {MAX_CANDIDATES}, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise PassError(f"top-p must be above 0 and at most 1 (off), not {self.top_p}")
        if not 0 <= self.seed < 1 << 64:
            raise PassError(f"seed must be 0 to 2^64-1, not {self.seed}")

    @property
    def sampler(self) -> Sampler:
        """The cheapest tail that computes these parameters."""
        if self.temperature == 0:
            return "greedy"
        return "truncated" if self.top_k or self.top_p < 1 else "sample"


def race_noise(ids: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """log E for token `ids` [N,C] at positions with `offsets` [N,2] -> [N,C] float32. See `pass_runtime.noise`."""
    first, second = (table.ravel() for table in noise.noise_tables(vocab_size))
    x = first[ids + noise.BLOCK * offsets[:, :1]] + second[ids + noise.BLOCK * offsets[:, 1:]]
    u = (x & ((1 << noise.BITS) - 1)).astype(np.float32) * noise.SCALE + np.float32(0.5) * noise.SCALE
    series = u * (1 + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    exponential = np.where(u < noise.SERIES_BELOW, series, -np.log(1 - u))
    log: npt.NDArray[np.float32] = np.log(exponential).astype(np.float32)
    return log


def race_scores(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """[N,V] logits of tokens to stand at `positions` [N] -> [N,V] scores; the token drawn is their argmax.

    -inf marks tokens that top-k or top-p removed. The margin between the two best scores says how near a tie is.
    """
    vocab = logits.shape[1]
    if params.temperature == 0:
        return logits
    scaled = logits / np.float32(max(params.temperature, MIN_TEMPERATURE))
    ids = np.broadcast_to(np.arange(vocab, dtype=np.int64), logits.shape)
    offsets = noise.noise_offsets(params.seed, positions)
    scores = scaled - race_noise(ids, offsets, vocab)
    if params.sampler == "truncated":
        scores = np.where(_kept(scaled, params), scores, np.float32(-np.inf))
    return scores


def sample(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.int64]:
    """[N,V] logits -> [N] token ids."""
    tokens: npt.NDArray[np.int64] = race_scores(logits, positions, params).argmax(-1)
    return tokens


def _kept(scaled: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """[N,V] bool: the top-k tokens, and of those the smallest set whose probability reaches top-p."""
    candidates = min(MAX_CANDIDATES, scaled.shape[1])
    order = np.argsort(-scaled, axis=-1, kind="stable")[:, :candidates]
    ranked = np.take_along_axis(scaled, order, -1)
    in_top_k = np.arange(candidates) < (params.top_k or candidates)
    total = ranked[:, in_top_k] if params.top_k else scaled
    top = ranked[:, :1]
    probability = np.exp(ranked - top) / np.exp(total - top).sum(-1, keepdims=True)
    before = np.cumsum(probability, -1) - probability
    kept = np.zeros(scaled.shape, np.bool_)
    np.put_along_axis(kept, order, in_top_k & (before < params.top_p), -1)
    return kept
