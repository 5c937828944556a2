"""What the tails compute besides sampling, in numpy: logits processors, log-probabilities, and the
drafts of a draft head. Tests compare the graphs with it.

When a look-ahead row is computed, the token before it is not known; the draft head reads that token
later. For the rows j = 0, 1, ... of a group, h_j is the hidden state that the LM head reads in row
j, l_j are its logits, and t_j is the token before it (the new root, then the drafts made so far).
hidden, table, token, state, bias and out are the draft head's arrays:

    s_j = silu(h_j hidden + table[t_j] token + s_{j-1} state + bias)      s_{-1} = 0
    draft j is chosen by l_j(c) + table[c] . (s_j out) among the candidates c; other tokens are
    never chosen

The candidates are the tokens of the CANDIDATE_BLOCKS blocks (`pass_runtime.bundle.noise`) that hold
the largest l_j; in a tie the lower block is taken. A small vocabulary, and one that blocks do not
divide, has all tokens as candidates. A draft is sampled as any token is
(`pass_runtime.bundle.reference`), with logits that are -inf for all other tokens.
"""

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
    """logits [B,R,V] -> [B,R,V]: a constraint, biases and penalties in the first P rows.

    allowed [B,P,V]: the tokens that may be drawn; FORBIDDEN_BIAS is added to the others' logits.
    touched [B,T]: tokens to which bias [B,T] is added; the sum is divided by factor [B,P,T] if it
    is above 0, and else multiplied by it; then penalty [B,P,T] is subtracted.
    """
    rows = factor.shape[1]
    processed = logits.copy()
    ids = np.broadcast_to(touched[:, None], factor.shape)
    values = np.take_along_axis(logits[:, :rows], ids, -1) + bias[:, None]
    values = np.where(values > 0, values / factor, values * factor) - penalty
    np.put_along_axis(processed[:, :rows], ids, values, -1)
    processed[:, :rows] += np.where(allowed, np.float32(0), np.float32(FORBIDDEN_BIAS))
    return processed


def token_logprobs(logits: Floats, emitted: Integers, k: int) -> tuple[Floats, Integers, Floats]:
    """Log-probabilities of emitted tokens, and of the K = min(k, V) most likely in their places.

    logits [B,R,V] and emitted [B,E], where token j was drawn from row j -> the emitted tokens'
    log-probabilities [B,E]; the ids [B,E,K] of the most likely tokens by falling probability, the
    lower id first in a tie; and the log-probabilities [B,E,K] of those. All are the model's own,
    before temperature and truncation.
    """
    rows = logits[:, : emitted.shape[1]]
    shifted = rows - rows.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :k]
    chosen = np.take_along_axis(logprobs, emitted[..., None], -1)[..., 0]
    return chosen, ids, np.take_along_axis(logprobs, ids, -1)


def candidates(logits: Floats) -> npt.NDArray[np.bool_]:
    """[N,V] logits -> [N,V] bool: which tokens are candidates in each row."""
    count, vocab = logits.shape
    chosen = np.ones((count, vocab), np.bool_)
    if has_candidate_subset(vocab):
        best = logits.reshape(count, BLOCK_SIZE, -1).max(1)
        chosen = np.zeros(best.shape, np.bool_)
        np.put_along_axis(
            chosen, np.argsort(-best, axis=-1, kind="stable")[:, :CANDIDATE_BLOCKS], True, -1
        )
        chosen = np.tile(chosen, (1, BLOCK_SIZE))
    return chosen


def adjusted_logits(head: HeadArrays, hidden: Floats, logits: Floats, before: Integers) -> Floats:
    """hidden [B,D,H], logits [B,D,V] and the token `before` each row [B,D] -> [B,D,V]: the logits
    that drafts are sampled from, -inf for tokens that are no candidates."""
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
        scores = logits[:, j] + state @ head.out @ table.T
        rows.append(np.where(candidates(logits[:, j]), scores, np.float32(-np.inf)))
    return np.stack(rows, 1)


def head_drafts(
    head: HeadArrays,
    hidden: Floats,
    logits: Floats,
    root: Integers,
    positions: Integers,
    params: SamplingParams,
) -> Integers:
    """Return the drafts [B,D] of a group of D look-ahead rows, one after the other.

    hidden [B,D,H] and logits [B,D,V] are those of the rows, root [B] is the token before the group,
    and positions [B,D] are the drafts' positions in the text.
    """
    before = np.zeros(positions.shape, np.int64)
    before[:, 0], drafts = root, np.zeros(positions.shape, np.int64)
    for j in range(positions.shape[1]):
        adjusted = adjusted_logits(
            head, hidden[:, : j + 1], logits[:, : j + 1], before[:, : j + 1]
        )[:, j]
        drafts[:, j] = sample(adjusted, positions[:, j], params)
        before[:, j + 1 : j + 2] = drafts[:, j : j + 1]
    return drafts
