"""The KV cache of all slots: a tensor [slots,KVH,S,D] for every layer's keys and values.

Slots are the outermost dimension. So a pass over the first b slots is bound to the beginning of every tensor, and the
prefill of one slot to that slot's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pass_runtime.backends.memory import Memory, item_size
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.bundle.tensors import PAST


class KVCache:
    """`capacity` is S, the KV capacity in tokens. It is 0 until the first `resize`."""

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
        """The bytes of one token's entry in one head."""
        return self._head_dim * item_size(self.dtype)

    def shape(self, slots: int) -> tuple[int, int, int, int]:
        """The shape that every tensor has for a pass over `slots` slots."""
        return slots, self._heads, self.capacity, self._head_dim

    def places(self, slot: int = 0) -> Iterator[tuple[str, int]]:
        """For every tensor, the name of its input and the address at which `slot` begins."""
        offset = slot * self._heads * self.capacity * self.entry_bytes
        for name, address in self._addresses.items():
            yield name, address + offset

    def resize(self, capacity: int, lengths: Sequence[int]) -> None:
        """Copy the first `lengths[slot]` entries of every slot into new tensors of `capacity`. Where memory runs out,
        the cache stays as it was."""
        grown: dict[str, int] = {}
        try:
            for name in self.names:
                grown[name] = self._memory.allocate(self.slots * self._heads * capacity * self.entry_bytes)
            if self.capacity:
                for name, address in grown.items():
                    self._copy(self._addresses[name], address, capacity, lengths)
        except BaseException:
            for address in grown.values():
                self._memory.free(address)
            raise
        old, self._addresses, self.capacity = self._addresses, grown, capacity
        for address in old.values():
            self._memory.free(address)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` entries of slot `source` over those of `target`."""
        pitch = self.capacity * self.entry_bytes
        for address in self._addresses.values():
            first, second = (address + slot * self._heads * pitch for slot in (source, target))
            self._memory.copy_rows(second, pitch, first, pitch, length * self.entry_bytes, self._heads)

    def _copy(self, source: int, target: int, capacity: int, lengths: Sequence[int]) -> None:
        old, new = self.capacity * self.entry_bytes, capacity * self.entry_bytes
        for slot, length in enumerate(lengths):
            first, second = source + slot * self._heads * old, target + slot * self._heads * new
            if length:
                self._memory.copy_rows(second, new, first, old, length * self.entry_bytes, self._heads)
