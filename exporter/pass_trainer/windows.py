"""Training windows: groups of look-ahead rows at many places (anchors) of one sequence run in one forward pass.

The layout of a sequence with look-ahead groups is a plan: the first token is the root, the others are drafts, and group
a follows the first a drafts. So `pass_runtime.bundle.plan` makes masks and positions, as for export and runtime.
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

    index [B,R]: the index of a row's look-ahead embedding.
    depth [B,R]: the row's position. The row's target is the model's distribution after the token at this position.
    mask [B,1,R,N+R] bool: the tokens and look-ahead rows that each row sees. valid [B,R] bool: False for padding.
    """

    index: torch.Tensor
    depth: torch.Tensor
    mask: torch.Tensor
    valid: torch.Tensor

    def to(self, device: torch.device) -> Windows:
        return Windows(*(t.to(device) for t in (self.index, self.depth, self.mask, self.valid)))


def sample_groups(
    rng: np.random.Generator, prompt: int, length: int, anchors: int, lookahead: int, decay: float
) -> tuple[int, ...]:
    """Return the size of the group at each of the `length` tokens of a sequence; 0 means no anchor.

    A group has more than i rows with probability decay**i. So row i has the weight decay**i on average, and most rows
    with small weights need not be computed. Anchors are in the model's own text, from the prompt's last token on.
    """
    groups = np.zeros(length, np.int64)
    places = np.arange(max(prompt - 1, 0), length - 1)
    chosen = rng.permutation(places)[:anchors]
    sizes = np.minimum(rng.geometric(1 - decay, len(chosen)) if decay < 1 else lookahead, lookahead)
    groups[chosen] = np.minimum(sizes, length - 1 - chosen)
    return tuple(int(size) for size in groups)


def full_groups(prompt: int, length: int, stride: int, lookahead: int) -> tuple[int, ...]:
    """Return groups for measuring: `lookahead` rows at every `stride`-th place that has enough tokens after it."""
    groups = [0] * length
    for anchor in range(max(prompt - 1, 0), length - lookahead, stride):
        groups[anchor] = lookahead
    return tuple(groups)


def pack(groups: Sequence[Sequence[int]], width: int) -> Windows:
    """Return the windows of sequences that are padded to `width` tokens. groups[b]: at most `width` group sizes."""
    plans = [Plan("train", width - 1, tuple(sizes)) for sizes in groups]
    rows = max(max(plan.width for plan in plans) - width, 1)
    index = torch.zeros(len(plans), rows, dtype=torch.long)
    depth, valid = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    mask = torch.zeros(len(plans), 1, rows, width + rows, dtype=torch.bool)
    mask[:, 0, :, 0] = True  # The softmax of a padding row would be NaN if it saw nothing.
    for b, plan in enumerate(plans):
        used = plan.width - width
        index[b, :used] = torch.from_numpy(plan.lookahead_ids(0))
        depth[b, :used] = torch.from_numpy(plan.row_position[width:])
        mask[b, 0, :used, : width + used] = torch.from_numpy(plan.window_mask[width:])
        valid[b, :used] = True
    return Windows(index, depth, mask, valid)
