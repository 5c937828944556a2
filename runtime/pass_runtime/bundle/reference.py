"""The sampler in numpy: the definition that the tail graphs are tested against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle import noise
from pass_runtime.bundle.request_fields import MAX_CANDIDATES
from pass_runtime.bundle.sampling import MIN_TEMPERATURE, SamplingParams


def log_exponentials(offsets: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.float32]:
    """offsets [N,2] of positions -> [N,I] float32: the logs of the exponential variables that each
    position reads. `noise.entries_per_position` says which of the I belong to blocks of tokens, and
    which to the tokens of a block."""
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
    """[N,V] logits at `positions` [N] -> [N,V] scores, whose argmax is the token that is drawn.

    Drawing has two levels: a block of the vocabulary, then a token in it, each by the Gumbel-max
    rule. A token's score is the score of its block, minus how far the token's score within the
    block is below the best one there. So the difference of the two best scores shows how close the
    choice was, on either level. Tokens that truncation removes have -inf.
    """
    if params.temperature == 0:
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
    """[N,V] logits / temperature, at most 0, and `log_exponentials` [N,I] -> [N,V] scores, as
    `gumbel_scores` returns them."""
    count, vocab = scaled.shape
    blocks = noise.vocabulary_blocks(vocab)
    padded = np.full((count, blocks * noise.BLOCK_SIZE), -np.inf, np.float32)
    padded[:, :vocab] = scaled
    by_block = padded.reshape(count, noise.BLOCK_SIZE, blocks)  # token t is in block t % blocks
    of_blocks, of_tokens = (
        log_noise[:, start : start + size] for start, size in noise.entries_per_position(vocab)
    )
    with np.errstate(divide="ignore"):  # log 0: a block whose tokens were all removed
        block_scores = np.log(np.exp(by_block).sum(1)) - of_blocks
    token_scores = by_block - of_tokens[:, :, None]
    best = token_scores.max(1, keepdims=True)
    below_best = np.where(
        np.isneginf(token_scores), token_scores, token_scores - np.where(np.isneginf(best), 0, best)
    )
    return np.asarray(
        (block_scores[:, None] + below_best).reshape(count, -1)[:, :vocab], np.float32
    )


def sample(
    logits: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], params: SamplingParams
) -> npt.NDArray[np.int64]:
    """[N,V] logits -> [N] token ids."""
    tokens: npt.NDArray[np.int64] = gumbel_scores(logits, positions, params).argmax(-1)
    return tokens


def kept_tokens(scaled: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """[N,V] logits / temperature, at most 0 -> [N,V] bool: which tokens truncation keeps.

    First top-k keeps the k most likely tokens, then top-p the smallest set of these whose
    probability reaches p, then min-p those that are at least min-p times as likely as the most
    likely token. Ties with the last token kept are kept too, as in Hugging Face's top-k.
    """
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
    """p [N,V] -> [N,1]: the smallest probability that top-k, and then top-p, keep."""
    ranked = -np.sort(-p, axis=-1)[:, :MAX_CANDIDATES]
    if params.top_k:
        ranked = ranked[:, : params.top_k]
    total = ranked.sum(-1, keepdims=True) if params.top_k else 1
    share = ranked / total
    within = (np.cumsum(share, -1) - share < params.top_p) | (params.top_p == 1)
    smallest: npt.NDArray[np.float32] = np.where(within, ranked, np.float32(2)).min(
        -1, keepdims=True
    )
    return smallest
