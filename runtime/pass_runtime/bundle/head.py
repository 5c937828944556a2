"""The draft head of a bundle: its arrays, their file, and what the tails compute with them, in numpy.

A look-ahead row does not know which token stands before it; the head does. For the rows j = 0, 1, ... of a group, h_j
is the hidden state that the LM head reads in row j, l_j are its logits, and t_j is the token before it (the new root,
then the drafts made so far):

    s_j = silu(h_j hidden + table[t_j] token + s_{j-1} state + bias)      s_{-1} = 0
    draft j is chosen by l_j(c) + table[c] . (s_j out) among the candidates c; other tokens have no chance

The candidates are the tokens of the CANDIDATE_BLOCKS blocks (`pass_runtime.bundle.noise`) that hold the largest l_j; in
a tie the lower block is taken. A small vocabulary, and one that blocks do not divide, has all tokens as candidates. A
draft is sampled as any token is (`pass_runtime.bundle.reference`), with logits that are -inf for all other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams

FILE = "tail.head.data"
"""The file of a bundle that its drafting tails read the arrays from: one after another, little-endian."""
PREFIX = "head_"
"""An array's name in the tails is this and its name in `Head`."""
CANDIDATE_BLOCKS = 64
"""How many blocks of the vocabulary hold the candidates for a draft."""
ALIGNMENT = 64
"""Every array in the file begins at a multiple of this many bytes."""

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Head:
    """The arrays: table [V,r] float16 and, in float32, hidden [H,m], token [r,m], state [m,m], bias [m] and out [m,r].
    A row vector is multiplied by them from the left."""

    table: npt.NDArray[np.float16]
    hidden: Floats
    token: Floats
    state: Floats
    bias: Floats
    out: Floats


@dataclass(frozen=True)
class Place:
    """Where an array lies in the file: `offset` and `size` are in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def layout(vocab_size: int, hidden_size: int, rank: int, width: int) -> dict[str, Place]:
    """The place of every array, by its name in `Head`."""
    shapes: dict[str, tuple[int, ...]] = {
        "table": (vocab_size, rank),
        "hidden": (hidden_size, width),
        "token": (rank, width),
        "state": (width, width),
        "bias": (width,),
        "out": (width, rank),
    }
    places, offset = {}, 0
    for name, shape in shapes.items():
        places[name] = Place(offset, shape, "<f2" if name == "table" else "<f4")
        offset += -(-places[name].size // ALIGNMENT) * ALIGNMENT
    return places


def file_size(places: Mapping[str, Place]) -> int:
    """The size of the file in bytes."""
    return max(place.offset + place.size for place in places.values())


def map_head(file: Path, places: Mapping[str, Place]) -> Head:
    """The arrays, mapped from their file."""
    data = np.memmap(file, np.uint8, "r")
    arrays: dict[str, Any] = {
        name: data[place.offset : place.offset + place.size].view(place.dtype).reshape(place.shape)
        for name, place in places.items()
    }
    return Head(**arrays)


def has_subset(vocab_size: int) -> bool:
    """Whether only some tokens of such a vocabulary are candidates."""
    blocks = vocabulary_blocks(vocab_size)
    return vocab_size == blocks * BLOCK_SIZE and blocks > CANDIDATE_BLOCKS


def candidates(logits: Floats) -> npt.NDArray[np.bool_]:
    """[N,V] logits -> [N,V] bool: which tokens are candidates in each row."""
    count, vocab = logits.shape
    chosen = np.ones((count, vocab), np.bool_)
    if has_subset(vocab):
        best = logits.reshape(count, BLOCK_SIZE, -1).max(1)
        chosen = np.zeros(best.shape, np.bool_)
        np.put_along_axis(chosen, np.argsort(-best, axis=-1, kind="stable")[:, :CANDIDATE_BLOCKS], True, -1)
        chosen = np.tile(chosen, (1, BLOCK_SIZE))
    return chosen


def adjusted_logits(head: Head, hidden: Floats, logits: Floats, before: Integers) -> Floats:
    """hidden [B,D,H], logits [B,D,V] and the token `before` each row [B,D] -> [B,D,V]: the logits that drafts are
    sampled from, -inf for tokens that are no candidates."""
    state, table = np.zeros((len(hidden), len(head.bias)), np.float32), head.table.astype(np.float32)
    rows = []
    for j in range(hidden.shape[1]):
        x = hidden[:, j] @ head.hidden + table[before[:, j]] @ head.token + state @ head.state + head.bias
        state = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(x / 2))  # silu
        scores = logits[:, j] + state @ head.out @ table.T
        rows.append(np.where(candidates(logits[:, j]), scores, np.float32(-np.inf)))
    return np.stack(rows, 1)


def head_drafts(
    head: Head, hidden: Floats, logits: Floats, root: Integers, positions: Integers, params: SamplingParams
) -> Integers:
    """The drafts [B,D] of a group of D look-ahead rows, each of which follows the one before.

    hidden [B,D,H] and logits [B,D,V] are those of the rows, root [B] is the token before the group, and positions [B,D]
    are the drafts' positions in the text.
    """
    before = np.zeros(positions.shape, np.int64)
    before[:, 0], drafts = root, np.zeros(positions.shape, np.int64)
    for j in range(positions.shape[1]):
        adjusted = adjusted_logits(head, hidden[:, : j + 1], logits[:, : j + 1], before[:, : j + 1])[:, j]
        drafts[:, j] = sample(adjusted, positions[:, j], params)
        before[:, j + 1 : j + 2] = drafts[:, j : j + 1]
    return drafts
