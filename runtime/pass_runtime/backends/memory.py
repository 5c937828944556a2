"""The memory of a device, and what a backend keeps in it: named buffers, the KV cache, and noise.

The device is the host or a GPU (`pass_runtime.backends.cuda`). Blocks of memory are given by their
addresses, because ONNX Runtime and TensorRT are both bound to addresses.
"""

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
"""The widths of wide prompt chunks, for GPUs: a chunk of 256 rows leaves a large GPU half idle. The
memory for the activations of a wide chunk stays reserved as long as the engine is open."""
MAX_CHUNK_BYTES = 1 << 30
"""The memory that the activations of a wide chunk may take."""


def activation_bytes(
    model: ModelInfo, rows: int, columns: int, logit_rows: int = 1, batch: int = 1
) -> int:
    """Estimate the bytes that a pass needs beside weights and KV cache: for the logits, and for the
    activations of one layer, as if no kernel were fused. rows: of a window. columns: cache entries
    that attention reads. logit_rows: rows of a window that get logits."""
    element_bytes = item_size(model.dtype)
    # two copies in float32
    logits = 2 * 4 * batch * logit_rows * model.vocab_size
    # four tensors as wide as the hidden states, and three of the MLP, which is 4 times as wide
    layer = batch * rows * (4 * model.hidden_size + 3 * 4 * model.hidden_size) * element_bytes
    # attention's scores, and a byte of the mask for each
    scores = batch * rows * model.heads * columns * (element_bytes + 1)
    return logits + layer + scores


def wide_chunks(model: ModelInfo, capacities: Sequence[int]) -> Mapping[int, int]:
    """Return, for each width in WIDE_CHUNK_ROWS, the largest of the KV `capacities` (tokens) with
    which a chunk fits the cache and MAX_CHUNK_BYTES; no entry if a chunk fits with none."""
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
"""Host memory begins at multiples of a CPU's cache line, which also suits vector instructions."""
NOISE_AHEAD_POSITIONS = 256
"""Noise is filled for this many positions beyond those of the next pass."""


class DeviceLost(PassError):
    """The device no longer works for this process: every later call will fail, too."""


class Memory(Protocol):
    """The memory of a device. Work that begins after a method has returned sees its effect."""

    failure: DeviceLost | None
    """The error by which the device was lost; None while the device works."""

    def allocate(self, size: int) -> int:
        """Return the address of `size` zeroed bytes. Raises PassError if memory has run out."""

    def free(self, address: int) -> None:
        """Free the block that `allocate` returned as `address`."""

    def upload(self, address: int, array: npt.NDArray[Any]) -> None:
        """Copy a contiguous host array to `address`. `array` may change afterwards."""

    def download(self, array: npt.NDArray[Any], address: int) -> None:
        """Fill a contiguous host array from `address`, after the device has done earlier work."""

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, size: int, rows: int
    ) -> None:
        """Copy `rows` rows of `size` bytes each, which begin `source_pitch` bytes apart, to rows
        that begin `target_pitch` bytes apart. source, target: the addresses of the first rows."""

    def for_this_thread(self) -> AbstractContextManager[None]:
        """A context that makes this device current for the calling thread."""

    def check_device(self) -> None:
        """Raise DeviceLost if the device is lost. To be called when an engine has failed."""

    def close(self) -> None:
        """Free everything. Repeated calls do nothing."""


def out_of_memory(size: int | None = None) -> PassError:
    """Return the error to raise if an allocation of `size` bytes (None: unknown) failed."""
    wanted = "" if size is None else f" for {size / 2**20:.1f} MiB more"
    return PassError(
        f"there is no memory{wanted}: use fewer slots (--max-batch-size), a smaller --capacity, "
        "or shorter prompts"
    )


class HostMemory:
    """The memory of the host."""

    failure: DeviceLost | None = None

    def __init__(self) -> None:
        self._blocks: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        try:
            # The system provides memory when it is first written, so large blocks cost nothing yet.
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
        """Do nothing: the host cannot be lost."""

    def close(self) -> None:
        """Do nothing: the blocks are freed with the last reference to this object."""


ITEM_SIZES = {"bfloat16": 2}
"""dtype -> bytes of an element, for dtypes that numpy does not have."""


def item_size(dtype: npt.DTypeLike) -> int:
    """Return the bytes of one element."""
    if isinstance(dtype, str) and dtype in ITEM_SIZES:
        return ITEM_SIZES[dtype]
    return np.dtype(dtype).itemsize


class Buffers:
    """Device memory that graphs are bound to, by name and shape. A name and shape is always at the
    same address, because captured CUDA graphs contain addresses. Some buffers have a row for each
    of `slots` slots; callers give the shape of one row.

    transient: names of buffers with rows whose content, such as logits, is not needed after the
    pass that wrote it. All shapes of such a name share a block of memory. If the block is too small
    for a new shape, another block of at least twice its size is allocated, and the old one stays
    for the shapes that use it. All blocks together take less than four times the largest buffer.
    """

    def __init__(self, memory: Memory, slots: int, transient: Collection[str] = ()) -> None:
        self._memory, self._slots, self._transient = memory, slots, transient
        self._largest: dict[str, tuple[int, int]] = {}
        """Name in `transient` -> size in bytes and address of its newest block."""
        self._addresses: dict[tuple[str, tuple[int, ...]], int] = {}
        self._filled: set[int] = set()  # addresses of the constants that were written

    def address_of(self, binding: Binding) -> int:
        """Return the address of a binding's buffer, after writing the binding's constant there."""
        if binding.by_slot:
            return self.rows_address(binding.buffer, binding.shape[1:], binding.dtype)
        address = self._address((binding.buffer, binding.shape), binding.shape, binding.dtype)
        if binding.constant is not None and address not in self._filled:
            self._memory.upload(address, np.ascontiguousarray(binding.constant))
            self._filled.add(address)
        return address

    def rows_address(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> int:
        """Return the address of the buffer `name` that has a row of `shape` for every slot."""
        return self._address((name, (-1, *shape)), (self._slots, *shape), dtype)

    def write(self, name: str, array: npt.NDArray[Any]) -> None:
        """Write a buffer that has no rows for slots."""
        self._memory.upload(
            self._address((name, array.shape), array.shape, array.dtype),
            np.ascontiguousarray(array),
        )

    def write_row(self, name: str, slot: int, values: npt.ArrayLike, dtype: npt.DTypeLike) -> None:
        """Write the row of `slot` in the buffer `name`."""
        row = np.array(values, dtype)
        address = self.rows_address(name, row.shape, row.dtype) + slot * row.nbytes
        self._memory.upload(address, row)

    def write_part(
        self, name: str, slot: int, shape: tuple[int, ...], first: int, items: npt.NDArray[Any]
    ) -> None:
        """Write `items` [n,...] to the items `first` to `first`+n-1 of the row of `slot`. shape:
        that of the whole row."""
        item_bytes = math.prod(shape[1:]) * items.itemsize
        offset = (slot * shape[0] + first) * item_bytes
        address = self.rows_address(name, shape, items.dtype) + offset
        self._memory.upload(address, np.ascontiguousarray(items))

    def read(
        self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, by_slot: bool = True
    ) -> npt.NDArray[Any]:
        """Return a copy of the first shape[0] rows of the buffer `name`, which has a row of
        shape[1:] for every slot; if not `by_slot`, of a buffer of this shape."""
        array = np.empty(shape, dtype)
        address = (
            self.rows_address(name, shape[1:], dtype)
            if by_slot
            else self._address((name, shape), shape, dtype)
        )
        self._memory.download(array, address)
        return array

    def _address(
        self, key: tuple[str, tuple[int, ...]], shape: tuple[int, ...], dtype: npt.DTypeLike
    ) -> int:
        """Return the address of a buffer of `shape`, which is allocated at the first call. key: its
        name and shape, which begins with -1 if the buffer has a row for every slot."""
        if key not in self._addresses:
            (name, key_shape), size = key, max(math.prod(shape), 1) * item_size(dtype)
            transient = name in self._transient and key_shape[:1] == (-1,)
            self._addresses[key] = (
                self._transient_address(name, size) if transient else self._memory.allocate(size)
            )
        return self._addresses[key]

    def _transient_address(self, name: str, size: int) -> int:
        """Return the address of a block of `size` bytes or more that all shapes of `name` share."""
        available, address = self._largest.get(name, (0, 0))
        if size > available:
            size = max(size, 2 * available)
            address = self._memory.allocate(size)
            self._largest[name] = size, address
        return address


class KVCache:
    """The KV cache of all slots: for every layer a tensor [slots,KVH,S,D] of keys and one of values
    (KVH: KV heads, D: the size of a head). S is `capacity`, the KV capacity in tokens, 0 until the
    first `resize`.

    Slots are the outermost dimension, so that a pass over the first b slots is bound to the
    beginning of every tensor, and the prefill of one slot to that slot's part.
    """

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
        """The bytes of an entry in one head of one tensor: a token's keys, or its values."""
        return self._head_dim * item_size(self.dtype)

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        """Return the shape that every tensor has for a pass over `slots` slots."""
        return slots, self._heads, self.capacity, self._head_dim

    def addresses(self, slot: int = 0) -> Iterator[tuple[str, int]]:
        """Yield for every tensor the name of the trunk's input and the address of `slot` in it."""
        offset = slot * self._heads * self._pitch(self.capacity)
        for name, address in self._addresses.items():
            yield name, address + offset

    def _pitch(self, capacity: int) -> int:
        """Return the bytes of one head of a slot in a tensor for `capacity` tokens."""
        return capacity * self.entry_bytes

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Copy the first `lengths[slot]` entries of every slot into new tensors for `capacity`
        tokens. If it fails, the cache stays as it was."""
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
        """Copy the first `length` entries of slot `source` to slot `target`."""
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        addresses = zip(self.addresses(source), self.addresses(target), strict=True)
        for (_, source_address), (_, target_address) in addresses:
            self._memory.copy_rows(target_address, pitch, source_address, pitch, size, self._heads)

    def saved_bytes(self, length: int) -> int:
        """Return the bytes that `save` writes for the first `length` entries of a slot."""
        return len(self.names) * self._heads * length * self.entry_bytes

    def save(self, slot: int, length: int, address: int) -> None:
        """Copy the first `length` entries of `slot` to the memory at `address`, as tensors
        [KVH,length,D] one after another."""
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        for number, (_, tensor) in enumerate(self.addresses(slot)):
            saved = address + number * self._heads * size
            self._memory.copy_rows(saved, size, tensor, pitch, size, self._heads)

    def load(self, slot: int, count: int, address: int, length: int) -> None:
        """Copy to `slot` the first `count` of the `length` entries that were saved at `address`."""
        pitch, size = self._pitch(self.capacity), length * self.entry_bytes
        for number, (_, tensor) in enumerate(self.addresses(slot)):
            saved = address + number * self._heads * size
            self._memory.copy_rows(
                tensor, pitch, saved, size, count * self.entry_bytes, self._heads
            )

    def keep_rows(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Keep only the K/V of `rows` of the last window, whose entries follow the first `length`
        of `slot`: move them next to each other. rows: rising from 0, the root."""
        pitch, size = self._pitch(self.capacity), self.entry_bytes
        for index, row in enumerate(rows):
            if index == row:  # in place already, as all rows of a chain
                continue
            for _, address in self.addresses(slot):
                target, source = (address + (length + entry) * size for entry in (index, row))
                self._memory.copy_rows(target, pitch, source, pitch, size, self._heads)

    def _copy(self, source: int, target: int, capacity: int, lengths: Sequence[int]) -> None:
        """Copy the tensor at address `source` to `target`, where it has another capacity."""
        old_pitch, new_pitch = self._pitch(self.capacity), self._pitch(capacity)
        for slot, length in enumerate(lengths):
            first_head, size = slot * self._heads, length * self.entry_bytes
            old, new = source + first_head * old_pitch, target + first_head * new_pitch
            if length:
                self._memory.copy_rows(new, new_pitch, old, old_pitch, size, self._heads)


class NoiseRows:
    """Writes the noise offsets that tails read (`pass_runtime.bundle.noise`): for every stream a
    buffer with a row [positions,2] int64 for each slot.

    A row is filled from the slot's present position to NOISE_AHEAD_POSITIONS beyond its next pass,
    and further when a later pass needs it, so that the cost of starting a request does not grow
    with the KV capacity.
    """

    def __init__(self, buffers: Buffers, rule: Rule, slots: int, positions: int) -> None:
        self._buffers, self._positions = buffers, positions
        self._streams = STREAMS if rule == "rejection" else STREAMS[:1]  # `match` reads the first
        self._seeds: list[int | None] = [None] * slots
        self._filled = [range(0)] * slots  # the positions that are filled in each slot's row

    def begin(self, slot: int, seed: int | None) -> None:
        """Start a new text in `slot`. seed: None for greedy decoding, which needs no noise."""
        self._seeds[slot], self._filled[slot] = seed, range(0)

    def cover(self, slot: int, first: int, stop: int) -> None:
        """Fill the positions `first` to `stop`-1 of the row of `slot` unless they are filled."""
        seed, filled = self._seeds[slot], self._filled[slot]
        stop = min(stop, self._positions)
        if seed is None or (filled.start <= first and stop <= filled.stop):
            return
        self._filled[slot] = range(0)  # If a write fails, nothing counts as filled.
        wanted = range(first, min(stop + NOISE_AHEAD_POSITIONS, self._positions))
        positions = np.arange(wanted.start, wanted.stop, dtype=np.int64)
        for stream in self._streams:
            offsets = noise_offsets(seed, positions, stream)
            self._buffers.write_part(stream, slot, (self._positions, 2), wanted.start, offsets)
        self._filled[slot] = wanted
