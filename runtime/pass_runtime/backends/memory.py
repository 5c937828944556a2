"""Where buffers live: the host's memory, or a device's (`pass_runtime.backends.cuda`). Addresses, not objects:
ONNX Runtime and TensorRT are both bound to addresses."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError

ALIGNMENT = 64
"""Bytes; a cache line, and what vector instructions like."""


class Memory(Protocol):
    """What buffers need of a device. What a method did, any work that begins after it sees."""

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes; PassError where there are none (see `out_of_memory`)."""

    def free(self, address: int) -> None: ...

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to `address`; `array` may change at once."""

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a contiguous host array from `address`, behind everything that was asked of the device before."""

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        """Copy `rows` rows of `size` bytes, which begin `pitch` bytes apart."""

    def close(self) -> None:
        """Free everything; harmless when repeated."""


def out_of_memory(size: int | None = None) -> PassError:
    """What to say, and do, where there are no `size` bytes."""
    more = "" if size is None else f" for {size / 2**20:.1f} MiB more"
    return PassError(
        f"there is no memory{more}: use fewer slots (--max-batch-size), a smaller --capacity, or shorter prompts"
    )


class HostMemory:
    """The host's own."""

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        try:
            block = np.zeros(size + ALIGNMENT, np.uint8)  # pages are taken when they are written
        except MemoryError:
            raise out_of_memory(size) from None
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * pitch, source + row * source_pitch, size)

    def close(self) -> None:
        """Blocks go with the last reference to this: nothing here outlives a session by accident."""


ITEM_SIZES = {"bfloat16": 2}
"""Bytes of an element of what numpy has no name for."""


def item_size(dtype: npt.DTypeLike) -> int:
    """Bytes of one element."""
    return ITEM_SIZES[dtype] if isinstance(dtype, str) and dtype in ITEM_SIZES else np.dtype(dtype).itemsize
