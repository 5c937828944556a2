"""The memory that buffers are in: the host's, or a device's (`pass_runtime.backends.cuda`). It is handled as addresses,
because ONNX Runtime and TensorRT are both bound to addresses."""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError

ALIGNMENT = 64
"""The bytes of a cache line, which also suits vector instructions."""


class DeviceLost(PassError):
    """The device does no more work for this process: this call failed, and every later one will."""


class Memory(Protocol):
    """What buffers need of a device. Work that begins after a method has returned sees its effect."""

    failure: DeviceLost | None
    """Set once the device is lost."""

    def allocate(self, size: int) -> int:
        """Address of `size` zeroed bytes; PassError where memory runs out (see `out_of_memory`)."""

    def free(self, address: int) -> None: ...

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to `address`. `array` may change afterwards."""

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a contiguous host array from `address`, after all earlier work of the device."""

    def copy_rows(self, target: int, pitch: int, source: int, source_pitch: int, size: int, rows: int) -> None:
        """Copy `rows` rows of `size` bytes, which begin `pitch` and `source_pitch` bytes apart."""

    def check_device(self) -> None:
        """After work that failed without a reason: raise DeviceLost where a lost device is the reason."""

    def close(self) -> None:
        """Free everything. Repeated calls do nothing."""


def out_of_memory(size: int | None = None) -> PassError:
    """The error for an allocation of `size` bytes that failed."""
    more = "" if size is None else f" for {size / 2**20:.1f} MiB more"
    return PassError(
        f"there is no memory{more}: use fewer slots (--max-batch-size), a smaller --capacity, or shorter prompts"
    )


class HostMemory:
    """The memory of the host."""

    failure: DeviceLost | None = None

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        try:
            block = np.zeros(size + ALIGNMENT, np.uint8)  # The system provides pages when they are first written.
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

    def check_device(self) -> None:
        """Does nothing: the host cannot be lost."""

    def close(self) -> None:
        """Does nothing: the blocks are freed with the last reference to this object."""


ITEM_SIZES = {"bfloat16": 2}
"""Bytes of an element, for types that numpy does not have."""


def item_size(dtype: npt.DTypeLike) -> int:
    """Bytes of one element."""
    return ITEM_SIZES[dtype] if isinstance(dtype, str) and dtype in ITEM_SIZES else np.dtype(dtype).itemsize
