"""K/V that slots give up, kept beside them for prompts that begin with the same tokens.

A slot has the K/V of one sequence, and a cache that is too long for what decodes is shortened. So that a short request
does not cost the long prompt that hundreds of others begin with, what a slot gives up is copied here first. The texts
used least recently make room for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.memory import KVCache, Memory
from pass_runtime.errors import PassError

BUDGET = 512 << 20
"""Bytes of host memory for all K/V that are kept here."""
MOST = 64
"""Texts that are kept: a prompt is compared with each of them."""
BLOCK = 16
"""Tokens are shared by so many: how many a prompt found in the cache, and so how long it took to read, tells whether
others began with a whole block, and never one token of theirs after another."""
LEAST = 32
"""Tokens of the shortest text that is kept: reading fewer again costs a pass or two."""
COMPARED = 64
"""Tokens that are compared at a time, which is faster than one after another."""


@dataclass(frozen=True, eq=False)
class Saved:
    """The K/V of `tokens`, `size` bytes at `address`, for requests with this salt."""

    salt: str
    tokens: tuple[int, ...]
    address: int
    size: int


class PrefixStore:
    """The K/V of texts, the one used last at the end. Only the thread that runs the scheduler may call it."""

    def __init__(self, cache: KVCache, memory: Memory, budget: int = BUDGET) -> None:
        self._cache, self._memory, self._budget = cache, memory, budget
        self._saved: list[Saved] = []

    @property
    def used(self) -> int:
        """Bytes of what is kept."""
        return sum(saved.size for saved in self._saved)

    def save(self, slot: int, tokens: Sequence[int], salt: str) -> None:
        """Copy the K/V of `tokens`, the first ones of `slot`. Too few, too many, or without memory for it, they are
        not kept; those of a longer text that begins with them are kept already."""
        size = self._cache.saved_bytes(len(tokens))
        if len(tokens) < LEAST or size > self._budget:
            return
        found, count = self.match(tokens, salt)
        if found is not None and count == len(tokens):
            self._touch(found)
            return
        mine = [one for one in self._saved if one.salt == salt]
        for saved in [one for one in mine if common_prefix(one.tokens, tokens) == len(one.tokens)]:
            self._drop(saved)
        while self.used + size > self._budget or len(self._saved) >= MOST:
            self._drop(self._saved[0])
        try:
            address = self._memory.allocate(size)
        except PassError:
            return
        self._cache.save(slot, len(tokens), address)
        self._saved.append(Saved(salt, tuple(tokens), address, size))

    def match(self, tokens: Sequence[int], salt: str) -> tuple[Saved | None, int]:
        """What has the most of the first ones of `tokens`, of texts with this salt, and how many."""
        counts = [common_prefix(saved.tokens, tokens) if saved.salt == salt else 0 for saved in self._saved]
        most = max(counts, default=0)
        return (self._saved[counts.index(most)], most) if most else (None, 0)

    def load(self, saved: Saved, slot: int, count: int) -> None:
        """Copy the first `count` entries of what is kept into `slot`, whose cache has room for them."""
        self._cache.load(slot, count, saved.address, len(saved.tokens))
        self._touch(saved)

    def _touch(self, saved: Saved) -> None:
        self._saved.remove(saved)
        self._saved.append(saved)

    def _drop(self, saved: Saved) -> None:
        self._saved.remove(saved)
        self._memory.free(saved.address)


def whole_blocks(count: int) -> int:
    """The tokens of `count` that are in whole blocks."""
    return count - count % BLOCK


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    most, count = min(len(a), len(b)), 0
    while count < most and list(a[count : count + COMPARED]) == list(b[count : count + COMPARED]):
        count += COMPARED
    return next((i for i in range(count, most) if a[i] != b[i]), most)
