"""The draft head in the tails: it chooses each draft by the token before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

HEAD_FILE = "tail.head.data"
"""Its arrays follow one another, little-endian."""
HEAD_PREFIX = "head_"
"""`head_table` in the tails is `HeadArrays.table`."""
CANDIDATE_BLOCKS = 64
"""The head scores the tokens of so many blocks, the likeliest ones."""
ALIGNMENT = 64
"""Every array begins at a multiple of this many bytes."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadArrays:
    """table [V,r] float16; hidden [H,m], token [r,m], state [m,m], bias [m] and out [m,r]
    float32.

    The head adds s @ out @ table.T to the logits of a look-ahead row. Its state is s = silu(h @
    hidden + table[t] @ token + s' @ state + bias): h is the row's hidden state, t the token
    before its draft, s' the state of the row before, 0 at a group's first row.
    """

    table: npt.NDArray[np.float16]
    hidden: Floats
    token: Floats
    state: Floats
    bias: Floats
    out: Floats


@dataclass(frozen=True)
class ArrayRegion:
    """An array's place in the file. offset: in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def head_layout(vocab_size: int, hidden_size: int, rank: int, width: int) -> dict[str, ArrayRegion]:
    shapes: dict[str, tuple[int, ...]] = {
        "table": (vocab_size, rank),
        "hidden": (hidden_size, width),
        "token": (rank, width),
        "state": (width, width),
        "bias": (width,),
        "out": (width, rank),
    }
    regions, offset = {}, 0
    for name, shape in shapes.items():
        regions[name] = ArrayRegion(offset, shape, "<f2" if name == "table" else "<f4")
        offset += -(-regions[name].nbytes // ALIGNMENT) * ALIGNMENT
    return regions


def has_candidate_subset(vocab_size: int) -> bool:
    """Whether the head scores CANDIDATE_BLOCKS blocks alone."""
    blocks = vocabulary_blocks(vocab_size)
    return vocab_size == blocks * BLOCK_SIZE and blocks > CANDIDATE_BLOCKS
