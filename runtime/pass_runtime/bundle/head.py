"""The arrays of a draft head and their file. `pass_exporter.tails.definitions` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

HEAD_FILE = "tail.head.data"
"""The file with the arrays, one after another and little-endian, for the tails that make drafts."""
HEAD_PREFIX = "head_"
"""Prefix of an array's name in the tails: `head_table` is `HeadArrays.table`."""
CANDIDATE_BLOCKS = 64
"""The candidates for a draft are the token ids of so many blocks, the likeliest ones."""
ALIGNMENT = 64
"""Every array in the file begins at a multiple of this many bytes."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class HeadArrays:
    """table [V,r] float16; hidden [H,m], token [r,m], state [m,m], bias [m] and out [m,r] float32.
    V: vocabulary size, H: hidden size, r: rank, m: width. The head adds s @ out @ table.T to the
    logits of a look-ahead row. The head's state is s = silu(h @ hidden + table[t] @ token + s' @
    state + bias), where h is the row's hidden state, t the token before the row, and s' the head's
    state of the row before, at first 0."""

    table: npt.NDArray[np.float16]
    hidden: Floats
    token: Floats
    state: Floats
    bias: Floats
    out: Floats


@dataclass(frozen=True)
class ArrayRegion:
    """Where an array lies in the file: `offset` and `nbytes` are in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def head_layout(vocab_size: int, hidden_size: int, rank: int, width: int) -> dict[str, ArrayRegion]:
    """Return where every array lies in the file, by its name in `HeadArrays`. rank, width: r, m."""
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


def map_head(file: Path, regions: Mapping[str, ArrayRegion]) -> HeadArrays:
    """Return the arrays, memory-mapped from `file`."""
    data = np.memmap(file, np.uint8, "r")
    arrays: dict[str, Any] = {
        name: np.ndarray(region.shape, region.dtype, data, region.offset)
        for name, region in regions.items()
    }
    return HeadArrays(**arrays)


def has_candidate_subset(vocab_size: int) -> bool:
    """Whether drafts are chosen from CANDIDATE_BLOCKS of the blocks, and not from the whole
    vocabulary."""
    blocks = vocabulary_blocks(vocab_size)
    return vocab_size == blocks * BLOCK_SIZE and blocks > CANDIDATE_BLOCKS
