from __future__ import annotations

import ctypes
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.bindings import Binding
from pass_runtime.bundle.manifest import Manifest, ModelInfo
from pass_runtime.bundle.noise import STREAMS, noise_offsets
from pass_runtime.bundle.sampling import Rule
from pass_runtime.bundle.tensors import PAST
from pass_runtime.errors import PassError

WIDE_CHUNK_ROWS = (2048, 1024)
"""A chunk of 256 rows leaves a large GPU half idle."""
MAX_CHUNK_BYTES = 1 << 30
"""For the activations of a wide chunk."""


def activation_bytes(
    model: ModelInfo, rows: int, columns: int, logit_rows: int = 1, batch: int = 1
) -> int:
    """Estimate the bytes of the logits and of one unfused layer's activations."""
    element_bytes = item_size(model.dtype)
    # two copies in float32
    logits = 2 * 4 * batch * logit_rows * model.vocab_size
    # four tensors like the hidden states, three of the MLP, 4 times as wide
    layer = batch * rows * (4 * model.hidden_size + 3 * 4 * model.hidden_size) * element_bytes
    # attention's scores, and a byte of mask each
    scores = batch * rows * model.heads * columns * (element_bytes + 1)
    return logits + layer + scores


def wide_chunks(model: ModelInfo, capacities: Sequence[int]) -> Mapping[int, int]:
    """Map widths to the largest KV capacity (tokens) at which such a chunk fits the cache and
    MAX_CHUNK_BYTES."""
    chunks = {}
    for rows in WIDE_CHUNK_ROWS:
        fitting = [
            capacity
            for capacity in capacities
            if rows <= capacity and activation_bytes(model, rows, capacity) <= MAX_CHUNK_BYTES
        ]
        if fitting:
            chunks[rows] = max(fitting)
    return chunks


ALIGNMENT_BYTES = 64
"""A CPU's cache line."""
NOISE_AHEAD_POSITIONS = 256
"""Noise is filled so far beyond the next pass."""


class DeviceLost(PassError):
    """The device no longer works for this process."""


class Memory(Protocol):
    """Work that begins after a method has returned sees its effect."""

    failure: DeviceLost | None

    def allocate(self, size: int) -> int:
        """Return the address of `size` zeroed bytes. Raises PassError without memory."""

    def free(self, address: int) -> None:
        """Undo `allocate`."""

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to `address`."""

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a contiguous host array, after earlier work."""

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int
    ) -> None:
        """Copy rows of `size` bytes; a pitch is the distance in bytes from one row to the next."""

    def for_this_thread(self) -> AbstractContextManager[None]:
        """Make this device the thread's current one."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device is lost."""

    def close(self) -> None:
        """Free everything."""


def out_of_memory(size: int | None = None) -> PassError:
    wanted = "" if size is None else f" for {size / 2**20:.1f} MiB more"
    return PassError(
        f"there is no memory{wanted}: use fewer slots (--max-batch-size), a smaller --capacity, "
        "or shorter prompts"
    )


class HostMemory:
    failure: DeviceLost | None = None

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        try:
            # The system provides memory at the first write: large blocks cost nothing yet.
            block = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
        except MemoryError:
            raise out_of_memory(size) from None
        address = -(-block.ctypes.data // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        del self._blocks[address]

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, size)

    def for_this_thread(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_device(self) -> None:
        """It cannot be lost."""

    def close(self) -> None:
        """The blocks go with this object."""


ITEM_SIZES = {"bfloat16": 2}
"""Bytes, for dtypes that numpy lacks."""


def item_size(dtype: npt.DTypeLike) -> int:
    if isinstance(dtype, str) and dtype in ITEM_SIZES:
        return ITEM_SIZES[dtype]
    return np.dtype(dtype).itemsize


class Buffers:
    """Device memory by name and shape, at fixed addresses, which CUDA graphs contain. Some
    buffers have a row for each slot; callers give a row's shape.

    transient: names whose rows are not needed after the pass. Their shapes share a block. A
    larger shape gets a new one of at least twice the size, and the old one stays for its shapes:
    in all, less than four times the largest buffer.
    """

    def __init__(self, memory: Memory, slots: int, transient: Collection[str] = ()) -> None:
        self._memory, self._slots, self._transient = memory, slots, transient
        self._largest: dict[str, tuple[int, int]] = {}
        """name -> bytes and address of the newest block"""
        self._addresses: dict[tuple[str, tuple[int, ...]], int] = {}
        self._filled: set[int] = set()

    def address_of(self, binding: Binding) -> int:
        """Return the address of a binding's buffer, after writing its constant."""
        if binding.by_slot:
            return self.rows_address(binding.buffer, binding.shape[1:], binding.dtype)
        address = self._address((binding.buffer, binding.shape), binding.shape, binding.dtype)
        if binding.constant is not None and address not in self._filled:
            self._memory.upload(address, np.ascontiguousarray(binding.constant))
            self._filled.add(address)
        return address

    def rows_address(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        """Return the address of a buffer with a row of `shape` for every slot."""
        return self._address((name, (-1, *shape)), (self._slots, *shape), dtype)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._memory.upload(
            self._address((name, array.shape), array.shape, array.dtype),
            np.ascontiguousarray(array),
        )

    def write_row(self, name: str, slot: int, values: npt.ArrayLike, dtype: npt.DTypeLike) -> None:
        row = np.array(values, dtype)
        address = self.rows_address(name, row.shape, row.dtype) + slot * row.nbytes
        self._memory.upload(address, row)

    def write_part(
        self, name: str, slot: int, shape: tuple[int, ...], first: int, items: npt.NDArray[Any]
    ) -> None:
        """Write `items` [n,...] to items `first` to `first`+n-1 of a row."""
        item_bytes = math.prod(shape[1:]) * items.itemsize
        offset = (slot * shape[0] + first) * item_bytes
        address = self.rows_address(name, shape, items.dtype) + offset
        self._memory.upload(address, np.ascontiguousarray(items))

    def read(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, by_slot: bool = True
    ) -> npt.NDArray[Any]:
        """Copy the first shape[0] rows of a buffer by slot, or a whole buffer."""
        array = np.empty(shape, dtype)
        key = (-1, *shape[1:]) if by_slot else shape
        whole = (self._slots, *shape[1:]) if by_slot else shape
        address = self._address((name, key), whole, dtype)
        self._memory.download(array, address)
        return array

    def _address(
        self, key: tuple[str, tuple[int, ...]], shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> int:
        if key not in self._addresses:
            (name, key_shape), size = key, max(math.prod(shape), 1) * item_size(dtype)
            transient = name in self._transient and key_shape[:1] == (-1,)
            self._addresses[key] = (
                self._transient_address(name, size) if transient else self._memory.allocate(size)
            )
        return self._addresses[key]

    def _transient_address(self, name: str, size: int) -> int:
        available, address = self._largest.get(name, (0, 0))
        if size > available:
            size = max(size, 2 * available)
            address = self._memory.allocate(size)
            self._largest[name] = size, address
        return address


class KVCache:
    """Two tensors [slots,KVH,S,D] a layer (KVH: KV heads, D: a head's size, S: `capacity` in
    tokens, 0 before `resize`). Slots are outermost: passes over b slots use the beginning."""

    def __init__(self, memory: Memory, manifest: Manifest, slots: int) -> None:
        model, self._memory, self.slots = manifest.model, memory, slots
        tensors = [tensor for tensor in manifest.trunk.inputs if tensor.name.startswith(PAST)]
        self.names = [tensor.name for tensor in tensors]
        self.dtype = tensors[0].dtype
        self._heads, self._head_dim = model.kv_heads, model.head_dim
        self.capacity = 0
        self._addresses: Mapping[str, int] = {}

    @property
    def entry_bytes(self) -> int:
        return self._head_dim * item_size(self.dtype)

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        return slots, self._heads, self.capacity, self._head_dim

    def addresses(self, slot: int = 0) -> Iterator[tuple[str, int]]:
        """Yield the trunk's input and its address in `slot`."""
        offset = slot * self._heads * self._pitch(self.capacity)
        for name, address in self._addresses.items():
            yield name, address + offset

    def _pitch(self, capacity: int) -> int:
        return capacity * self.entry_bytes

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Keep `lengths[slot]` entries, in new tensors for `capacity` tokens."""
        resized: dict[str, int] = {}
        try:
            for name in self.names:
                resized[name] = self._memory.allocate(
                    self.slots * self._heads * self._pitch(capacity)
                )
            if self.capacity:
                for name, address in resized.items():
                    self._copy(self._addresses[name], address, capacity, lengths)
        except BaseException:
            for address in resized.values():
                self._memory.free(address)
            raise
        old, self._addresses, self.capacity = self._addresses, resized, capacity
        for address in old.values():
            self._memory.free(address)

    def copy_slot(self, source: int, target: int, length: int) -> None:
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        addresses = zip(self.addresses(source), self.addresses(target), strict=True)
        for (_, source_address), (_, target_address) in addresses:
            self._memory.copy_rows(target_address, pitch, source_address, pitch, size, self._heads)

    def saved_bytes(self, length: int) -> int:
        return len(self.names) * self._heads * length * self.entry_bytes

    def save(self, slot: int, length: int, address: int) -> None:
        """Copy `length` entries to `address`, as tensors [KVH,length,D]."""
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        for number, (_, tensor) in enumerate(self.addresses(slot)):
            saved = address + number * self._heads * size
            self._memory.copy_rows(saved, size, tensor, pitch, size, self._heads)

    def load(self, slot: int, count: int, address: int, length: int) -> None:
        """Copy `count` of the `length` entries at `address`."""
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        for number, (_, tensor) in enumerate(self.addresses(slot)):
            saved = address + number * self._heads * size
            self._memory.copy_rows(
                tensor, pitch, saved, size, count * self.entry_bytes, self._heads
            )

    def _copy(self, source: int, target: int, capacity: int, lengths: Sequence[int]) -> None:
        old_pitch, new_pitch = self._pitch(self.capacity), self._pitch(capacity)
        for slot, length in enumerate(lengths):
            first_head, size = slot * self._heads, length * self.entry_bytes
            old, new = source + first_head * old_pitch, target + first_head * new_pitch
            if length:
                self._memory.copy_rows(new, new_pitch, old, old_pitch, size, self._heads)


class NoiseRows:
    """Noise offsets for tails: for every stream a buffer [positions,2] int64 by slot. Rows are
    filled a little ahead: a request's start costs the same with every capacity."""

    def __init__(self, buffers: Buffers, rule: Rule, slots: int, positions: int) -> None:
        self._buffers, self._positions = buffers, positions
        self._streams = STREAMS if rule == "rejection" else STREAMS[:1]  # `match` reads the first
        self._seeds: list[int | None] = [None] * slots
        self._filled = [range(0)] * slots  # the filled positions of each slot

    def begin(self, slot: int, seed: int | None) -> None:
        self._seeds[slot], self._filled[slot] = seed, range(0)

    def cover(self, slot: int, first: int, stop: int) -> None:
        """Fill positions `first` to `stop`-1."""
        seed, filled = self._seeds[slot], self._filled[slot]
        stop = min(stop, self._positions)
        if seed is None or (filled.start <= first and stop <= filled.stop):
            return
        self._filled[slot] = range(0)  # until the write succeeds
        wanted = range(first, min(stop + NOISE_AHEAD_POSITIONS, self._positions))
        positions = np.arange(wanted.start, wanted.stop, dtype=np.int64)
        for stream in self._streams:
            offsets = noise_offsets(seed, positions, stream)
            self._buffers.write_part(stream, slot, (self._positions, 2), wanted.start, offsets)
        self._filled[slot] = wanted
