"""The arrays of a draft head, a small network in the tails that chooses each draft by the token
before it, and the layout of their file, which the exporter writes and the tails read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

HEAD_FILE = "tail.head.data"
"""The file of a bundle that holds the arrays, one after another, little-endian."""
HEAD_PREFIX = "head_"
"""Prefix of an array's name in the tail graphs: `head_table` is `HeadArrays.table`."""
CANDIDATE_BLOCKS = 64
"""The head scores the tokens of this many blocks (`bundle.noise`), the likeliest ones."""
ALIGNMENT = 64
"""Every array in the file begins at a multiple of this many bytes."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadArrays:
    """The weights of a draft head: table [V,r] float16; hidden [H,m], token [r,m], state [m,m],
    bias [m] and out [m,r] float32. V: vocabulary size, H: hidden size, r: rank, m: width.

    The head adds s @ out @ table.T to the logits of a look-ahead row. Its state is s = silu(h @
    hidden + table[t] @ token + s' @ state + bias), where h is the row's hidden state, t the token
    before the row's draft, and s' the head's state at the row before, or 0 at a group's first row.
    """

    table: npt.NDArray[np.float16]
    hidden: Floats
    token: Floats
    state: Floats
    bias: Floats
    out: Floats


@dataclass(frozen=True)
class ArrayRegion:
    """The place of an array in the file. offset: the place of its first byte. nbytes: its size."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def head_layout(vocab_size: int, hidden_size: int, rank: int, width: int) -> dict[str, ArrayRegion]:
    """Return the place of each array by its name in `HeadArrays`. rank, width: r and m there."""
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


def head_file_size(regions: Mapping[str, ArrayRegion]) -> int:
    """Return the size of the file in bytes."""
    return max(region.offset + region.nbytes for region in regions.values())


def has_candidate_subset(vocab_size: int) -> bool:
    """Whether the head scores the tokens of CANDIDATE_BLOCKS blocks alone. For this the logits are
    split into blocks of BLOCK_SIZE ids, so the vocabulary must divide into such blocks."""
    blocks = vocabulary_blocks(vocab_size)
    return vocab_size == blocks * BLOCK_SIZE and blocks > CANDIDATE_BLOCKS
