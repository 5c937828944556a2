"""Training windows: look-ahead rows in groups after many tokens (anchors) of a sequence, for one forward pass.

`pass_runtime.bundle.plan` makes masks and positions, as for export and runtime: the sequence is laid out as one window,
with its first token as the root and its other tokens as drafts. Group a follows token a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pass_runtime.bundle.plan import Plan


@dataclass(frozen=True)
class Windows:
    """The look-ahead rows of B sequences of N tokens, padded to R rows.

    lookahead_index [B,R] int64: the index of a row's look-ahead embedding.
    position [B,R] int64: the row's position. Its target is the model's distribution after the token at this position.
    mask [B,1,R,N+R] bool: the tokens and look-ahead rows that each row sees. valid [B,R] bool: False for padding.
    """

    lookahead_index: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Windows:
        return Windows(*(t.to(device) for t in (self.lookahead_index, self.position, self.mask, self.valid)))


def sample_groups(
    rng: np.random.Generator, prompt: int, length: int, anchors: int, lookahead: int, decay: float
) -> tuple[int, ...]:
    """Return the size of the group after each of the `length` tokens of a sequence; 0 means that it is no anchor.

    Up to `anchors` anchors are drawn from the prompt's last token on. A group has more than i rows with probability
    decay**i. So row i has the loss weight decay**i on average, without computing all rows that have small weights.
    prompt: the number of tokens of the prompt.
    """
    groups = np.zeros(length, np.int64)
    chosen = rng.permutation(np.arange(max(prompt - 1, 0), length - 1))[:anchors]
    sizes = np.minimum(rng.geometric(1 - decay, len(chosen)) if decay < 1 else lookahead, lookahead)
    groups[chosen] = np.minimum(sizes, length - 1 - chosen)
    return tuple(int(size) for size in groups)


def full_groups(prompt: int, length: int, stride: int, lookahead: int) -> tuple[int, ...]:
    """Return groups for measuring: L = `lookahead` rows after every `stride`-th token that has L tokens after it."""
    groups = [0] * length
    for anchor in range(max(prompt - 1, 0), length - lookahead, stride):
        groups[anchor] = lookahead
    return tuple(groups)


def make_windows(groups: Sequence[Sequence[int]], width: int) -> Windows:
    """Return the windows of sequences that are padded to `width` tokens. groups[b]: up to `width` sizes."""
    plans = [Plan("train", width - 1, tuple(sizes)) for sizes in groups]
    rows = max(max(plan.width for plan in plans) - width, 1)
    index = torch.zeros(len(plans), rows, dtype=torch.long)
    position, valid = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    mask = torch.zeros(len(plans), 1, rows, width + rows, dtype=torch.bool)
    mask[:, 0, :, 0] = True  # The softmax of a padding row would be NaN if it saw nothing.
    for b, plan in enumerate(plans):
        used = plan.width - width
        index[b, :used] = torch.from_numpy(plan.lookahead_ids(0))
        position[b, :used] = torch.from_numpy(plan.row_position[width:])
        mask[b, 0, :used, : width + used] = torch.from_numpy(plan.window_mask[width:])
        valid[b, :used] = True
    return Windows(index, position, mask, valid)
