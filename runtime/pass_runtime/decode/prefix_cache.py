"""Copies of the K/V that slots give up, for later prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.memory import KVCache, Memory
from pass_runtime.errors import PassError

MAX_SAVED_BYTES = 512 << 20
MAX_SAVED_PREFIXES = 64
BLOCK_TOKENS = 16
"""Blocks protect prompts: a short prefill tells a client that another's prompt begins like its
own."""
MIN_SAVED_TOKENS = 32
"""Prefilling fewer again costs a pass or two."""
COMPARED_TOKENS = 64
"""Faster than one by one."""


@dataclass(frozen=True, eq=False)
class SavedPrefix:
    """`size` bytes at `address`; for requests with the same salt only."""

    salt: str
    tokens: tuple[int, ...]
    address: int
    size: int


class PrefixStore:
    """The most recently used is last. Only the engine's thread calls the methods."""

    def __init__(self, cache: KVCache, memory: Memory, budget: int = MAX_SAVED_BYTES) -> None:
        self._cache, self._memory, self._budget = cache, memory, budget
        self._saved: list[SavedPrefix] = []

    @property
    def used_bytes(self) -> int:
        return sum(saved.size for saved in self._saved)

    def save(self, slot: int, tokens: Sequence[int], salt: str) -> None:
        size = self._cache.saved_bytes(len(tokens))
        if len(tokens) < MIN_SAVED_TOKENS or size > self._budget:
            return
        closest, length = self.match(tokens, salt)
        if closest is not None and length == len(tokens):
            self._touch(closest)
            return
        for saved in [each for each in self._saved if each.salt == salt]:
            if common_prefix(saved.tokens, tokens) == len(saved.tokens):
                self._drop(saved)  # The new copy begins with its tokens.
        while self.used_bytes + size > self._budget or len(self._saved) >= MAX_SAVED_PREFIXES:
            self._drop(self._saved[0])
        try:
            address = self._memory.allocate(size)
        except PassError:
            return
        self._cache.save(slot, len(tokens), address)
        self._saved.append(SavedPrefix(salt, tuple(tokens), address, size))

    def match(self, tokens: Sequence[int], salt: str) -> tuple[SavedPrefix | None, int]:
        """Return the copy with this salt and the longest common prefix, and its length; else
        None and 0."""
        lengths = [common_prefix(s.tokens, tokens) if s.salt == salt else 0 for s in self._saved]
        longest = max(lengths, default=0)
        return (self._saved[lengths.index(longest)], longest) if longest else (None, 0)

    def load(self, saved: SavedPrefix, slot: int, count: int) -> None:
        """Copy `count` tokens' K/V into `slot`, which has room."""
        self._cache.load(slot, count, saved.address, len(saved.tokens))
        self._touch(saved)

    def _touch(self, saved: SavedPrefix) -> None:
        self._saved.remove(saved)
        self._saved.append(saved)

    def _drop(self, saved: SavedPrefix) -> None:
        self._saved.remove(saved)
        self._memory.free(saved.address)


def rounded_to_blocks(count: int) -> int:
    """Round down."""
    return count - count % BLOCK_TOKENS


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return its length in tokens."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, COMPARED_TOKENS):
        piece = slice(start, min(start + COMPARED_TOKENS, shorter))
        if list(a[piece]) != list(b[piece]):
            return next(i for i in range(start, shorter) if a[i] != b[i])
    return shorter
