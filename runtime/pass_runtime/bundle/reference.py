"""The sampler in numpy: the definition that the tail graphs are tested against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle import noise
from pass_runtime.bundle.sampling import MAX_CANDIDATES, MIN_TEMPERATURE, SamplingParams


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
        scaled = np.where(kept(scaled, params), scaled, np.float32(-np.inf))
    return two_races(scaled, race_noise(noise.noise_offsets(params.seed or 0, positions), logits.shape[1]))


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


def kept(scaled: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.bool_]:
    """[N,V] logits / temperature, at most 0 -> [N,V] bool: the top-k tokens; of those the smallest set whose
    probability reaches top-p; and of those the ones at least min-p times as likely as the most likely one.

    Tokens as likely as the last one kept are kept too, as Hugging Face's top-k does.
    """
    p = np.exp(scaled)
    p /= p.sum(-1, keepdims=True)
    least = np.float32(params.min_p) * p.max(-1, keepdims=True)
    if params.top_k or params.top_p < 1:
        least = np.maximum(least, _least_candidate(p, params))
    enough: npt.NDArray[np.bool_] = p >= least
    return enough


def _least_candidate(p: npt.NDArray[np.float32], params: SamplingParams) -> npt.NDArray[np.float32]:
    """[N,V] -> [N,1]: the least probability that top-k, then top-p, keep."""
    ranked = -np.sort(-p, axis=-1)[:, :MAX_CANDIDATES]
    if params.top_k:
        ranked = ranked[:, : params.top_k]
    total = ranked.sum(-1, keepdims=True) if params.top_k else 1
    share = ranked / total
    within = (np.cumsum(share, -1) - share < params.top_p) | (params.top_p == 1)
    least: npt.NDArray[np.float32] = np.where(within, ranked, np.float32(2)).min(-1, keepdims=True)
    return least


def token_logprobs(
    logits: npt.NDArray[np.float32], emitted: npt.NDArray[np.int64], k: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Log-probabilities of the tokens that a pass wrote, and of the K = min(k, V) most likely ones in their places.

    logits [B,R,V], emitted [B,E], where token j was drawn from row j -> [B,E], ids [B,E,K] by falling probability (the
    lower id first in a tie), and theirs [B,E,K]. They are the model's own: before temperature and truncation.
    """
    rows = logits[:, : emitted.shape[1]]
    behind = rows - rows.max(-1, keepdims=True)
    logprobs = behind - np.log(np.exp(behind).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :k]
    chosen = np.take_along_axis(logprobs, emitted[..., None], -1)[..., 0]
    return chosen, ids, np.take_along_axis(logprobs, ids, -1)
