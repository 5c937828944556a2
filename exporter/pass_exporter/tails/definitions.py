"""Defines in numpy what the tails compute besides sampling: logits processors, log-probabilities,
and the drafts of a draft head. Tests compare the graphs with these functions.

When a look-ahead row is computed, the token before it is not known; the draft head adds that token
later. For row j = 0, 1, ... of a group, h_j is the hidden state that the LM head reads, l_j are the
logits, and t_j is the token before the row (the new root, or the draft of row j-1). table, bias and
the W are the arrays of `HeadArrays`:

    s_j = silu(h_j W_hidden + table[t_j] W_token + s_{j-1} W_state + bias)      s_{-1} = 0
    l_j(c) + table[c] . (s_j W_out)     is the logit of candidate token c as draft j

The candidate tokens of row j are those of the CANDIDATE_BLOCKS blocks (blocks of token ids, see
`pass_runtime.bundle.noise`) whose largest l_j is largest; in a tie the lower block is taken. In a
small vocabulary, and in one that is no multiple of the block size, all tokens are candidates. Other
tokens have the logit -inf. The draft is then sampled from these logits as any token is
(`pass_runtime.bundle.reference`).
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
    """Return logits [B,R,V] with a constraint, biases and penalties applied in the first P rows.

    allowed [B,P,V]: which tokens may be drawn; FORBIDDEN_BIAS is added to the logits of the others.
    touched [B,T]: the tokens that have a bias or a penalty. bias [B,T] is added to their logits. A
    sum above 0 is divided by factor [B,P,T], any other sum is multiplied by it. Then penalty
    [B,P,T] is subtracted.
    """
    row_count = factor.shape[1]
    processed = logits.copy()
    ids = np.broadcast_to(touched[:, None], factor.shape)
    values = np.take_along_axis(logits[:, :row_count], ids, -1) + bias[:, None]
    values = np.where(values > 0, values / factor, values * factor) - penalty
    np.put_along_axis(processed[:, :row_count], ids, values, -1)
    processed[:, :row_count] += np.where(allowed, np.float32(0), np.float32(FORBIDDEN_BIAS))
    return processed


def token_logprobs(logits: Floats, emitted: Integers, k: int) -> tuple[Floats, Integers, Floats]:
    """Return log-probabilities of emitted tokens, and of the K = min(k, V) most likely tokens.

    emitted [B,E]: token j was drawn from row j of logits [B,R,V]. Returns the log-probabilities
    [B,E] of the emitted tokens; the ids [B,E,K] of each row's most likely tokens by falling
    probability, the lower id first in a tie; and the log-probabilities [B,E,K] of the latter. All
    are those of softmax(logits), before temperature and truncation.
    """
    rows = logits[:, : emitted.shape[1]]
    shifted = rows - rows.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1, kind="stable")[..., :k]
    chosen = np.take_along_axis(logprobs, emitted[..., None], -1)[..., 0]
    return chosen, ids, np.take_along_axis(logprobs, ids, -1)


def candidates(logits: Floats) -> npt.NDArray[np.bool_]:
    """Return which tokens are candidates in each row: logits [N,V] -> [N,V] bool."""
    count, vocab = logits.shape
    if not has_candidate_subset(vocab):
        return np.ones((count, vocab), np.bool_)
    block_maxima = logits.reshape(count, BLOCK_SIZE, -1).max(1)  # token t is in block t % blocks
    chosen_blocks = np.argsort(-block_maxima, axis=-1, kind="stable")[:, :CANDIDATE_BLOCKS]
    is_chosen = np.zeros(block_maxima.shape, np.bool_)
    np.put_along_axis(is_chosen, chosen_blocks, True, -1)
    return np.tile(is_chosen, (1, BLOCK_SIZE))


def adjusted_logits(head: HeadArrays, hidden: Floats, logits: Floats, before: Integers) -> Floats:
    """Return the logits [B,D,V] from which drafts are sampled; -inf if a token is no candidate.

    hidden [B,D,H], logits [B,D,V]: those of the first D rows of a group. before [B,D]: the token
    before each row.
    """
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
    """Return the drafts [B,D] of a group of D look-ahead rows.

    hidden [B,D,H], logits [B,D,V]: those of the rows. root [B]: the token before the first row.
    positions [B,D]: the drafts' positions in the text.
    """
    batch, depth = positions.shape
    tokens = np.zeros((batch, 1 + depth), np.int64)  # the root, then the drafts
    tokens[:, 0] = root
    for j in range(depth):
        rows = slice(j + 1)  # The state of row j depends on all rows before.
        adjusted = adjusted_logits(head, hidden[:, rows], logits[:, rows], tokens[:, rows])[:, j]
        tokens[:, j + 1] = sample(adjusted, positions[:, j], params)
    return tokens[:, 1:]
