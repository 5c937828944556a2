"""Sampling parameters, and the sampler in numpy: the definition that the tail graphs are tested against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle import noise
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
    nucleus is taken among the MAX_CANDIDATES most likely tokens. Tokens as likely as the last one kept are kept too.
    seed: 64 bits; with it a token is a pure function of logits and position.
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


def race_noise(offsets: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """log E of every number of the races (`noise.race_entries`) at positions with `offsets` [N,2]: [N,I] float32."""
    rows = np.arange(noise.race_rows(vocab_size))
    first, second = (table[rows + offsets[:, i : i + 1]] for i, table in enumerate(noise.noise_tables(vocab_size)))
    x = (first + second).reshape(len(offsets), -1)
    u = (x & ((1 << noise.BITS) - 1)).astype(np.float32) * noise.SCALE + np.float32(0.5) * noise.SCALE
    series = u * (1 + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    exponential = np.where(u < noise.SERIES_BELOW, series, -np.log(1 - u))
    log: npt.NDArray[np.float32] = np.log(exponential).astype(np.float32)
    return log


def race_scores(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """[N,V] logits of tokens to stand at `positions` [N] -> [N,V] scores; the token drawn is their argmax.

    A token's score is its block's in the race of blocks, less what it is behind in the race of the block's members. So
    the margin between the two best says how near a tie is, in whichever race. -inf marks removed tokens.
    """
    if params.temperature == 0:
        return logits
    scaled = logits / np.float32(max(params.temperature, MIN_TEMPERATURE))
    scaled = scaled - scaled.max(-1, keepdims=True)
    if params.sampler == "truncated":
        scaled = np.where(_kept(scaled, params), scaled, np.float32(-np.inf))
    return two_races(scaled, race_noise(noise.noise_offsets(params.seed, positions), logits.shape[1]))


def two_races(scaled: npt.NDArray[np.float32], log_noise: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[N,V] log weights, at most 0, and `race_noise` -> [N,V] scores."""
    count, vocab = scaled.shape
    blocks = noise.vocabulary_blocks(vocab)
    padded = np.full((count, blocks * noise.MEMBERS), -np.inf, np.float32)
    padded[:, :vocab] = scaled
    by_block = padded.reshape(count, noise.MEMBERS, blocks)
    of_blocks, of_members = (log_noise[:, start : start + size] for start, size in noise.race_entries(vocab))
    with np.errstate(divide="ignore"):  # log 0: a block of removed tokens
        block_scores = np.log(np.exp(by_block).sum(1)) - of_blocks
    members = by_block - of_members[:, :, None]
    best = members.max(1, keepdims=True)
    behind = np.where(np.isneginf(members), members, members - np.where(np.isneginf(best), 0, best))
    return np.asarray((block_scores[:, None] + behind).reshape(count, -1)[:, :vocab], np.float32)


def sample(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.int64]:
    """[N,V] logits -> [N] token ids."""
    tokens: npt.NDArray[np.int64] = race_scores(logits, positions, params).argmax(-1)
    return tokens


def _kept(scaled: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """[N,V] bool: the top-k tokens, and of those the smallest set whose probability reaches top-p.

    Tokens as likely as the last one kept are kept too, as Hugging Face's top-k does.
    """
    p = np.exp(scaled)
    p /= p.sum(-1, keepdims=True)
    ranked = -np.sort(-p, axis=-1)[:, :MAX_CANDIDATES]
    if params.top_k:
        ranked = ranked[:, : params.top_k]
    total = ranked.sum(-1, keepdims=True) if params.top_k else 1
    share = ranked / total
    within = (np.cumsum(share, -1) - share < params.top_p) | (params.top_p == 1)
    least = np.where(within, ranked, 2).min(-1, keepdims=True)
    kept: npt.NDArray[np.bool_] = p >= least
    return kept
