"""Training windows: look-ahead groups at many places (anchors) of one sequence share a forward pass.

A sequence with look-ahead groups is laid out as a plan: its first token is the root, the others are drafts, and group a
follows the first a drafts. So masks and positions come from `pass_runtime.bundle.plan`, as in export and runtime.
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

    index [B,R]: the number of a row's look-ahead embedding. depth [B,R]: the row's position; the row should reproduce
    the next-token distribution of the token at this position. mask [B,1,R,N+R] bool. valid [B,R] bool: False for
    padding.
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
    """Return the size of the group at every token of one sequence, 0 where there is no anchor: [length].

    A group has more than i rows with probability decay**i. On average this weights rows by decay**i, and most rows that
    hardly count are not computed. Anchors lie in the model's own text, from the prompt's last token on.
    """
    groups = np.zeros(length, np.int64)
    places = np.arange(max(prompt - 1, 0), length - 1)
    chosen = rng.permutation(places)[:anchors]
    sizes = np.minimum(rng.geometric(1 - decay, len(chosen)) if decay < 1 else lookahead, lookahead)
    groups[chosen] = np.minimum(sizes, length - 1 - chosen)
    return tuple(int(size) for size in groups)


def full_groups(prompt: int, length: int, stride: int, lookahead: int) -> tuple[int, ...]:
    """Return groups for measuring: a whole group at every `stride`-th place with enough tokens after it."""
    groups = [0] * length
    for anchor in range(max(prompt - 1, 0), length - lookahead, stride):
        groups[anchor] = lookahead
    return tuple(groups)


def pack(groups: Sequence[Sequence[int]], width: int) -> Windows:
    """Return the windows of sequences that are padded to `width` tokens; groups[b] has at most `width` sizes."""
    plans = [Plan("train", width - 1, tuple(sizes)) for sizes in groups]
    rows = max(max(plan.width for plan in plans) - width, 1)
    index = torch.zeros(len(plans), rows, dtype=torch.long)
    depth, valid = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    mask = torch.zeros(len(plans), 1, rows, width + rows, dtype=torch.bool)
    mask[:, 0, :, 0] = True  # a padding row must attend to something, or its softmax is NaN
    for b, plan in enumerate(plans):
        used = plan.width - width
        index[b, :used] = torch.from_numpy(plan.lookahead_ids(0))
        depth[b, :used] = torch.from_numpy(plan.row_position[width:])
        mask[b, 0, :used, : width + used] = torch.from_numpy(plan.window_mask[width:])
        valid[b, :used] = True
    return Windows(index, depth, mask, valid)
