"""Named device memory that several graphs are bound to. The same name and shape is always the same memory, at the same
address, because captured CUDA graphs contain the addresses."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.memory import Memory, item_size
from pass_runtime.bundle.bindings import Binding


class Buffers:
    """Buffers by name and shape. Those with a row for each of `slots` slots are found by the shape of a row.

    passing: names of buffers with rows whose content is not needed after the pass that wrote it, as logits. Buffers of
    such a name share memory, whatever their shapes. Where that memory is too small for a shape, a new block of at least
    twice its size is allocated, so that all blocks together are less than four times the largest buffer.
    """

    def __init__(self, memory: Memory, slots: int, passing: Collection[str] = ()) -> None:
        self._memory, self._slots, self._passing = memory, slots, passing
        self._largest: dict[str, tuple[int, int]] = {}
        """For each name in `passing`: the size in bytes and the address of its newest block."""
        self._addresses: dict[tuple[str, tuple[int, ...]], int] = {}
        self._filled: set[int] = set()

    def at(self, binding: Binding) -> int:
        """The address of a binding's buffer. A constant is written there at the first call."""
        if binding.by_slot:
            return self.rows(binding.buffer, binding.shape[1:], binding.dtype)
        address = self._get((binding.buffer, binding.shape), binding.shape, binding.dtype)
        if binding.constant is not None and address not in self._filled:
            self._memory.upload(address, np.ascontiguousarray(binding.constant))
            self._filled.add(address)
        return address

    def rows(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        """The address of the buffer `name` that has a row of `shape` for every slot."""
        return self._get((name, (-1, *shape)), (self._slots, *shape), dtype)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Write a whole buffer that has no rows for slots."""
        self._memory.upload(self._get((name, array.shape), array.shape, array.dtype), np.ascontiguousarray(array))

    def write_row(self, name: str, slot: int, values: npt.ArrayLike, dtype: npt.DTypeLike) -> None:
        """Write the row of `slot`."""
        row = np.array(values, dtype)
        address = self.rows(name, row.shape, row.dtype) + slot * row.nbytes
        self._memory.upload(address, row)

    def write_part(self, name: str, slot: int, shape: tuple[int, ...], first: int, items: npt.NDArray[Any]) -> None:
        """Write `items` into the row of `slot`, which has this `shape`, beginning at its item `first`."""
        item = math.prod(shape[1:]) * items.itemsize
        address = self.rows(name, shape, items.dtype) + (slot * shape[0] + first) * item
        self._memory.upload(address, np.ascontiguousarray(items))

    def read(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A copy of the first shape[0] rows of a buffer with a row for every slot."""
        array = np.empty(shape, dtype)
        self._memory.download(array, self.rows(name, shape[1:], dtype))
        return array

    def _get(self, key: tuple[str, tuple[int, ...]], shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        if key not in self._addresses:
            (name, row), size = key, max(math.prod(shape), 1) * item_size(dtype)
            passing = name in self._passing and row[:1] == (-1,)
            self._addresses[key] = self._shared(name, size) if passing else self._memory.allocate(size)
        return self._addresses[key]

    def _shared(self, name: str, size: int) -> int:
        available, address = self._largest.get(name, (0, 0))
        if size > available:
            size = max(size, 2 * available)
            address = self._memory.allocate(size)
            self._largest[name] = size, address
        return address
