"""The draft head of a bundle: its arrays and their file. `pass_exporter.tails.definitions` has what is computed with
them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.noise import BLOCK_SIZE, vocabulary_blocks

FILE = "tail.head.data"
"""The file of a bundle that its drafting tails read the arrays from: one after another, little-endian."""
PREFIX = "head_"
"""An array's name in the tails is this and its name in `Head`."""
CANDIDATE_BLOCKS = 64
"""How many blocks of the vocabulary hold the candidates for a draft."""
ALIGNMENT = 64
"""Every array in the file begins at a multiple of this many bytes."""

Floats = npt.NDArray[np.float32]


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
