"""Named device memory that several graphs are bound to: the same name and shape is the same memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import Memory, item_size
from pass_runtime.bundle.bindings import Binding


class Buffers:
    """Buffers by name and shape; those with a row for each of `slots` slots are found by their row's shape."""

    def __init__(self, memory: Memory, slots: int) -> None:
        self._memory, self._slots = memory, slots
        self._addresses: dict[tuple[str, tuple[int, ...]], int] = {}
        self._filled: set[int] = set()

    def at(self, binding: Binding) -> int:
        """The address of a binding's buffer, filled if it is a constant."""
        if binding.by_slot:
            return self.rows(binding.buffer, binding.shape[1:], binding.dtype)
        address = self._get((binding.buffer, binding.shape), binding.shape, binding.dtype)
        if binding.constant is not None and address not in self._filled:
            self._memory.upload(address, np.ascontiguousarray(binding.constant))
            self._filled.add(address)
        return address

    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        """The address of a buffer with a row of `shape` for every slot."""
        return self._get((name, (-1, *shape)), (self._slots, *shape), dtype)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Fill a buffer that has no rows for slots."""
        self._memory.upload(self._get((name, array.shape), array.shape, array.dtype), np.ascontiguousarray(array))

    def write_row(self, name: str, slot: int, values: npt.ArrayLike, dtype: npt.DTypeLike) -> None:
        """Fill the row of `slot`."""
        row = np.array(values, dtype)
        address = self.rows(name, row.shape, row.dtype) + slot * row.nbytes
        self._memory.upload(address, row)

    def read(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A copy of the first shape[0] rows of a buffer with a row for every slot."""
        array = np.empty(shape, dtype)
        self._memory.download(array, self.rows(name, shape[1:], dtype))
        return array

    def _get(self, key: tuple[str, tuple[int, ...]], shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        if key not in self._addresses:
            self._addresses[key] = self._memory.allocate(max(math.prod(shape), 1) * item_size(dtype))
        return self._addresses[key]
