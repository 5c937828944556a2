"""Training windows: groups of look-ahead rows after many tokens (anchors) of a sequence.

The definition is a `pass_runtime.bundle.plan.Plan`, as for export and runtime: the sequence is laid
out as one window, with its first token as the root and its other tokens as drafts. Group a follows
token a. `make_windows` computes the same for a whole batch with tensor operations, because a plan
for each sequence takes longer than a GPU's pass; a property test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Sizes = npt.NDArray[np.int64]
"""[N]: the size of the group after each token of a sequence; 0 if it is no anchor."""


@dataclass(frozen=True)
class Windows:
    """The look-ahead rows of B sequences of N tokens, padded to R rows.

    lookahead_index [B,R] int64: the index of a row's look-ahead embedding.
    position [B,R] int64: the row's position. Its target is the model's distribution after the token
    at this position. mask [B,1,R,N+R] bool: the tokens and look-ahead rows that each row sees.
    rows [n] int64: the rows that are no padding, as indices into [B*R]. anchors [B] int64: the
    groups of a sequence.
    """

    lookahead_index: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    anchors: torch.Tensor


def sample_groups(
    rng: np.random.Generator, prompt: int, length: int, anchors: int, lookahead: int, decay: float
) -> Sizes:
    """Return the sizes of the groups of a sequence of `length` tokens.

    Up to `anchors` anchors are drawn from the prompt's last token on. A group has more than i rows
    with probability decay**i. So row i has the loss weight decay**i on average, without computing
    all rows that have small weights.
    prompt: the number of tokens of the prompt.
    """
    groups = np.zeros(length, np.int64)
    chosen = rng.permutation(np.arange(max(prompt - 1, 0), length - 1))[:anchors]
    sizes = np.minimum(rng.geometric(1 - decay, len(chosen)) if decay < 1 else lookahead, lookahead)
    groups[chosen] = np.minimum(sizes, length - 1 - chosen)
    return groups


def full_groups(prompt: int, length: int, stride: int, lookahead: int) -> Sizes:
    """Return groups to measure: `lookahead` rows after every `stride`-th token that has room."""
    groups = np.zeros(length, np.int64)
    groups[max(prompt - 1, 0) : max(length - lookahead, 0) : stride] = lookahead
    return groups


def make_windows(
    groups: Sequence[Sizes], width: int, device: torch.device | str = "cpu"
) -> Windows:
    """Return the windows, on `device`, of sequences of `width` tokens. groups[b]: their sizes.

    Shapes follow from `groups`, which are on the host, so nothing waits for the device.
    """
    padded = np.zeros((len(groups), width), np.int64)
    for b, sizes in enumerate(groups):
        padded[b, : len(sizes)] = sizes
    counts = padded.sum(1)
    batch, rows, valid_rows = len(groups), max(int(counts.max()), 1), int(counts.sum())
    size = on_device(torch.from_numpy(padded), device)
    end = size.cumsum(1)
    row = torch.arange(rows, device=device).expand(batch, rows).contiguous()
    valid = row < end[:, -1:]
    anchor = torch.searchsorted(end, row, right=True).clamp_(max=width - 1)
    index = torch.where(valid, row - (end - size).gather(1, anchor), 0)
    position = torch.where(valid, anchor + 1 + index, 0)
    sees_tokens = (torch.arange(width, device=device) <= anchor[..., None]) & valid[..., None]
    sees_tokens[..., 0] = True  # The softmax of a padding row would be NaN if it saw nothing.
    same_group = (anchor[:, :, None] == anchor[:, None]) & valid[:, :, None] & valid[:, None]
    sees_rows = same_group & (row[:, :, None] >= row[:, None])
    count = end[:, -1]
    sequence = torch.repeat_interleave(
        torch.arange(batch, device=device), count, output_size=valid_rows
    )
    place = torch.arange(valid_rows, device=device) - (count.cumsum(0) - count)[sequence]
    mask = torch.cat([sees_tokens, sees_rows], -1)[:, None]
    return Windows(index, position, mask, sequence * rows + place, (size > 0).sum(1))


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor of the host to `device`, without waiting for what a GPU still has to do."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type == "cuda"
        else tensor
    )
