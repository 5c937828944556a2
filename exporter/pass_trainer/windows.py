"""Lays out look-ahead rows after many tokens of a sequence, its anchors, as a `Window` does, but
for a batch with tensor operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Sizes = npt.NDArray[np.int64]
"""The size [N] of the group after each token of a sequence; 0 after a token that is no anchor."""


@dataclass(frozen=True)
class Windows:
    """The look-ahead rows of B sequences of N tokens, padded to R rows. lookahead_index [B,R]
    int64: of embeddings. position [B,R] int64: a row learns the distribution after the token there.
    mask [B,1,R,N+R] bool: what each row sees. rows [n] int64: those that are no padding, as indices
    into [B*R]. anchors [B] int64."""

    lookahead_index: torch.Tensor
    position: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    anchors: torch.Tensor


def sample_groups(
    rng: np.random.Generator,
    prompt_length: int,
    length: int,
    anchors: int,
    lookahead: int,
    decay: float,
) -> Sizes:
    """Return random groups after up to `anchors` tokens from the prompt's last one on. A group has
    more than i rows with probability decay**i, the mean loss weight of row i."""
    sizes = np.zeros(length, np.int64)
    chosen = rng.permutation(np.arange(max(prompt_length - 1, 0), length - 1))[:anchors]
    drawn = np.minimum(rng.geometric(1 - decay, len(chosen)) if decay < 1 else lookahead, lookahead)
    sizes[chosen] = np.minimum(drawn, length - 1 - chosen)  # Every row is at a token's position.
    return sizes


def full_groups(prompt_length: int, length: int, stride: int, lookahead: int) -> Sizes:
    """Return groups after every `stride`-th token from the prompt's last on, where all `lookahead`
    rows fit."""
    sizes = np.zeros(length, np.int64)
    sizes[max(prompt_length - 1, 0) : max(length - lookahead, 0) : stride] = lookahead
    return sizes


def make_windows(
    groups: Sequence[Sizes], width: int, device: torch.device | str = "cpu"
) -> Windows:
    """Return the windows of sequences of `width` tokens. Shapes are computed on the host, which so
    does not wait for the device."""
    padded = np.zeros((len(groups), width), np.int64)
    for b, sizes in enumerate(groups):
        padded[b, : len(sizes)] = sizes
    row_counts = padded.sum(1)
    batch, rows, valid_count = len(groups), max(int(row_counts.max()), 1), int(row_counts.sum())
    size = on_device(torch.from_numpy(padded), device)
    end = size.cumsum(1)  # the number of rows up to the end of each group
    row = torch.arange(rows, device=device).expand(batch, rows).contiguous()
    valid = row < end[:, -1:]
    anchor = torch.searchsorted(end, row, right=True).clamp_(max=width - 1)  # of each row
    index = torch.where(valid, row - (end - size).gather(1, anchor), 0)
    position = torch.where(valid, anchor + 1 + index, 0)
    sees_tokens = (torch.arange(width, device=device) <= anchor[..., None]) & valid[..., None]
    sees_tokens[..., 0] = True  # The softmax of a padding row would be NaN if it saw nothing.
    same_group = (anchor[:, :, None] == anchor[:, None]) & valid[:, :, None] & valid[:, None]
    sees_rows = same_group & (row[:, :, None] >= row[:, None])
    count = end[:, -1]  # `row_counts`, on the device
    sequence = torch.repeat_interleave(
        torch.arange(batch, device=device), count, output_size=valid_count
    )
    row_in_sequence = torch.arange(valid_count, device=device) - (count.cumsum(0) - count)[sequence]
    mask = torch.cat([sees_tokens, sees_rows], -1)[:, None]
    return Windows(index, position, mask, sequence * rows + row_in_sequence, (size > 0).sum(1))


def on_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy to `device` without waiting for what a GPU still has to do."""
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if torch.device(device).type == "cuda"
        else tensor
    )
