"""What the tails compute besides sampling, in numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.head import CANDIDATE_BLOCKS, HeadArrays, has_candidate_subset
from pass_runtime.bundle.noise import BLOCK_SIZE
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import FORBIDDEN_BIAS, SamplingParams

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def process_logits(
    logits: Floats,
    allowed: npt.NDArray[np.bool_],
    touched: Integers,
    bias: Floats,
    factor: Floats,
    penalty: Floats,
) -> Floats:
    """logits [B,R,V], allowed [B,P,V], touched tokens and their bias [B,T], factor and penalty
    [B,P,T], for the first P rows."""
    row_count = factor.shape[1]
    processed = logits.copy()
    ids = np.broadcast_to(touched[:, None], factor.shape)
    values = np.take_along_axis(logits[:, :row_count], ids, -1) + bias[:, None]
    values = np.where(values > 0, values / factor, values * factor) - penalty
    np.put_along_axis(processed[:, :row_count], ids, values, -1)
    processed[:, :row_count] += np.where(allowed, np.float32(0), np.float32(FORBIDDEN_BIAS))
    return processed


def token_logprobs(logits: Floats, emitted: Integers, k: int) -> tuple[Floats, Integers, Floats]:
    """Return those of emitted tokens [B,E], and the ids and log-probabilities [B,E,K] of the
    likeliest, the lower id first in a tie."""
    rows = logits[:, : emitted.shape[1]]
    shifted = rows - rows.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :k]
    chosen = np.take_along_axis(logprobs, emitted[..., None], -1)[..., 0]
    return chosen, ids, np.take_along_axis(logprobs, ids, -1)


def candidates(logits: Floats) -> npt.NDArray[np.bool_]:
    count, vocab = logits.shape
    if not has_candidate_subset(vocab):
        return np.ones((count, vocab), np.bool_)
    block_maxima = logits.reshape(count, BLOCK_SIZE, -1).max(1)  # token t is in block t % blocks
    chosen_blocks = np.argsort(-block_maxima, axis=-1, kind="stable")[:, :CANDIDATE_BLOCKS]
    is_chosen = np.zeros(block_maxima.shape, np.bool_)
    np.put_along_axis(is_chosen, chosen_blocks, True, -1)
    return np.tile(is_chosen, (1, BLOCK_SIZE))


def adjusted_logits(head: HeadArrays, hidden: Floats, logits: Floats, before: Integers) -> Floats:
    """[B,D,V], -inf for others than candidates. before [B,D]: the token before each row."""
    state = np.zeros((len(hidden), len(head.bias)), np.float32)
    table = head.table.astype(np.float32)
    rows = []
    for j in range(hidden.shape[1]):
        x = (
            hidden[:, j] @ head.hidden
            + table[before[:, j]] @ head.token
            + state @ head.state
            + head.bias
        )
        state = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(x / 2))  # silu
        adjusted = logits[:, j] + state @ head.out @ table.T
        rows.append(np.where(candidates(logits[:, j]), adjusted, np.float32(-np.inf)))
    return np.stack(rows, 1)


def head_drafts(
    head: HeadArrays,
    hidden: Floats,
    logits: Floats,
    root: Integers,
    positions: Integers,
    params: SamplingParams,
) -> Integers:
    """[B,D], of a group of look-ahead rows."""
    batch, depth = positions.shape
    tokens = np.zeros((batch, 1 + depth), np.int64)  # the root, then the drafts
    tokens[:, 0] = root
    for j in range(depth):
        rows = slice(j + 1)  # The state of row j depends on all rows before.
        adjusted = adjusted_logits(head, hidden[:, rows], logits[:, rows], tokens[:, rows])[:, j]
        tokens[:, j + 1] = sample(adjusted, positions[:, j], params)
    return tokens[:, 1:]
