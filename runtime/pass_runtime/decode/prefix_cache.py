"""Copies of the K/V that slots give up, for later prompts that begin with the same tokens.

A slot loses the K/V of its last sequence when another sequence gets the slot, or when the KV cache
shrinks because the requests need less. `Runner` copies them here first, so that a long prompt with
which many requests begin need not be prefilled again. The least recently used copies make room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.memory import KVCache, Memory
from pass_runtime.errors import PassError

MAX_SAVED_BYTES = 512 << 20
"""The most bytes of all copies together."""
MAX_SAVED_PREFIXES = 64
"""The most copies. Every new prompt is compared with each of them."""
BLOCK_TOKENS = 16
"""Prefixes are shared in blocks of this many tokens, to protect prompts from clients that time
their requests: a short prefill tells a client that another client's prompt begins like its own.
With blocks a client has to guess this many tokens at once, not one after the other."""
MIN_SAVED_TOKENS = 32
"""The shortest prefix that is copied, in tokens: prefilling fewer again costs a pass or two."""
COMPARED_TOKENS = 64
"""How many tokens are compared at once, which is faster than one by one."""


@dataclass(frozen=True, eq=False)
class SavedPrefix:
    """A copy of the K/V of `tokens`: `size` bytes at `address`. salt: the `cache_salt` of the
    request that wrote them; only requests with the same salt may use the copy."""

    salt: str
    tokens: tuple[int, ...]
    address: int
    size: int


class PrefixStore:
    """The copies, the most recently used last. Only the scheduler's thread may call its methods."""

    def __init__(self, cache: KVCache, memory: Memory, budget: int = MAX_SAVED_BYTES) -> None:
        self._cache, self._memory, self._budget = cache, memory, budget
        self._saved: list[SavedPrefix] = []

    @property
    def used_bytes(self) -> int:
        """The bytes of all copies together."""
        return sum(saved.size for saved in self._saved)

    def save(self, slot: int, tokens: Sequence[int], salt: str) -> None:
        """Copy the K/V of `tokens`, with which `slot` begins. Do nothing if they are too few, if
        there is no memory for them, or if an older copy begins with them."""
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
        """Return the copy with this salt that has the longest prefix in common with `tokens`, and
        the length of that prefix; None and 0 if no copy begins like them."""
        lengths = [common_prefix(s.tokens, tokens) if s.salt == salt else 0 for s in self._saved]
        longest = max(lengths, default=0)
        return (self._saved[lengths.index(longest)], longest) if longest else (None, 0)

    def load(self, saved: SavedPrefix, slot: int, count: int) -> None:
        """Copy the K/V of the first `count` tokens of `saved` into `slot`, which has room."""
        self._cache.load(slot, count, saved.address, len(saved.tokens))
        self._touch(saved)

    def _touch(self, saved: SavedPrefix) -> None:
        """Make `saved` the most recently used copy."""
        self._saved.remove(saved)
        self._saved.append(saved)

    def _drop(self, saved: SavedPrefix) -> None:
        self._saved.remove(saved)
        self._memory.free(saved.address)


def rounded_to_blocks(count: int) -> int:
    """Return `count` tokens, rounded down to whole blocks."""
    return count - count % BLOCK_TOKENS


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length in tokens of the longest prefix that two sequences have in common."""
    shorter = min(len(a), len(b))
    for start in range(0, shorter, COMPARED_TOKENS):
        piece = slice(start, min(start + COMPARED_TOKENS, shorter))
        if list(a[piece]) != list(b[piece]):
            return next(i for i in range(start, shorter) if a[i] != b[i])
    return shorter
