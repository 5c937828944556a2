"""Sampling in numpy: the definition of what the tails compute."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle import noise
from pass_runtime.bundle.sampling import MAX_CANDIDATES, MIN_TEMPERATURE, SamplingParams


def log_exponentials(offsets: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """offsets [N,2] -> logarithms of exponential variables, [N,I] float32."""
    rows = np.arange(noise.rows_per_position(vocab_size))
    first, second = (
        table[rows + offsets[:, i : i + 1]]
        for i, table in enumerate(noise.noise_tables(vocab_size))
    )
    x = (first + second).reshape(len(offsets), -1)
    integers = (x & ((1 << noise.BITS) - 1)).astype(np.float32)
    u = integers * noise.SCALE + np.float32(0.5) * noise.SCALE
    series = u * (1 + u * (np.float32(0.5) + u * np.float32(1 / 3)))
    exponential = np.where(u < noise.SERIES_LIMIT, series, -np.log(1 - u))
    log: npt.NDArray[np.float32] = np.log(exponential).astype(np.float32)
    return log


def gumbel_scores(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """Return scores [N,V] whose argmax is drawn from logits [N,V] at `positions` [N]."""
    if params.sampler == "greedy":
        return logits
    scaled = logits / np.float32(max(params.temperature, MIN_TEMPERATURE))
    scaled = scaled - scaled.max(-1, keepdims=True)
    if params.sampler == "truncated":
        scaled = np.where(kept_tokens(scaled, params), scaled, np.float32(-np.inf))
    return two_level_scores(
        scaled, log_exponentials(noise.noise_offsets(params.seed or 0, positions), logits.shape[1])
    )


def two_level_scores(
    scaled: npt.NDArray[np.float32], log_noise: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return the scores [N,V] for logits / temperature [N,V], at most 0, and `log_exponentials`
    [N,I]."""
    count, vocab = scaled.shape
    blocks = noise.vocabulary_blocks(vocab)
    padded = np.full((count, blocks * noise.BLOCK_SIZE), -np.inf, np.float32)
    padded[:, :vocab] = scaled
    by_block = padded.reshape(count, noise.BLOCK_SIZE, blocks)  # token t is in block t % blocks
    noise_of_blocks, noise_of_tokens = (
        log_noise[:, start : start + size] for start, size in noise.entries_per_position(vocab)
    )
    with np.errstate(divide="ignore"):  # log 0: all tokens removed
        block_scores = np.log(np.exp(by_block).sum(1)) - noise_of_blocks
    # All blocks share the tokens' noise: only tokens of the drawn block compete.
    token_scores = by_block - noise_of_tokens[:, :, None]
    best = token_scores.max(1, keepdims=True)
    finite_best = np.where(np.isneginf(best), 0, best)  # -inf - -inf would be NaN
    below_best = token_scores - finite_best
    scores = (block_scores[:, None] + below_best).reshape(count, -1)[:, :vocab]
    return np.asarray(scores, np.float32)


def sample(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.int64]:
    """logits [N,V] at `positions` [N] -> ids [N]."""
    tokens: npt.NDArray[np.int64] = gumbel_scores(logits, positions, params).argmax(-1)
    return tokens


def kept_tokens(scaled: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """logits / temperature [N,V], at most 0 -> the tokens that truncation keeps, [N,V] bool."""
    p = np.exp(scaled)
    p /= p.sum(-1, keepdims=True)
    smallest = np.float32(params.min_p) * p.max(-1, keepdims=True)
    if params.top_k or params.top_p < 1:
        smallest = np.maximum(smallest, _smallest_kept_probability(p, params))
    is_kept: npt.NDArray[np.bool_] = p >= smallest
    return is_kept


def _smallest_kept_probability(
    p: npt.NDArray[np.float32], params: SamplingParams
) -> npt.NDArray[np.float32]:
    """p [N,V] -> the smallest probability [N,1] that top-k, and then top-p, keep."""
    ranked = -np.sort(-p, axis=-1)[:, :MAX_CANDIDATES]
    if params.top_k:
        ranked = ranked[:, : params.top_k]
    total = ranked.sum(-1, keepdims=True) if params.top_k else 1  # top-p counts what top-k keeps
    share = ranked / total
    # With top_p 1, the rounded sum may reach it before the last token.
    is_kept = (np.cumsum(share, -1) - share < params.top_p) | (params.top_p == 1)
    # 2 is more than any probability.
    smallest: npt.NDArray[np.float32] = np.where(is_kept, ranked, np.float32(2)).min(
        -1, keepdims=True
    )
    return smallest
