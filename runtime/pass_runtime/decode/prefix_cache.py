"""Copies of the K/V that slots give up, for later prompts that begin with the same tokens.

A slot has the K/V of one sequence, and loses them to the next sequence, or when the KV cache
shrinks because a short request needs less. They are copied here first, so that a long prompt that
many requests begin with need not be prefilled again. The copies used least recently make room for
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pass_runtime.backends.memory import KVCache, Memory
from pass_runtime.errors import PassError

MAX_SAVED_BYTES = 512 << 20
"""Bytes for the K/V of all copies."""
MAX_SAVED_PREFIXES = 64
"""The most copies: a prompt is compared with each of them."""
BLOCK_TOKENS = 16
"""Prefixes are shared in blocks of this many tokens. This protects prompts: a short prefill tells a
client that the prompt of another client began alike, and with blocks it has to guess this many
tokens at once, not one after the other."""
MIN_SAVED_TOKENS = 32
"""The shortest prefix that is copied, in tokens: prefilling fewer again costs a pass or two."""
COMPARED_TOKENS = 64
"""Tokens that are compared at once, which is faster than one after another."""


@dataclass(frozen=True, eq=False)
class SavedPrefix:
    """A copy of the K/V of `tokens`: `size` bytes at `address`. Only requests with the same
    `cache_salt` use it."""

    salt: str
    tokens: tuple[int, ...]
    address: int
    size: int


class PrefixStore:
    """Copies of K/V, the most recently used last. Only the scheduler's thread may call it."""

    def __init__(self, cache: KVCache, memory: Memory, budget: int = MAX_SAVED_BYTES) -> None:
        self._cache, self._memory, self._budget = cache, memory, budget
        self._saved: list[SavedPrefix] = []

    @property
    def used(self) -> int:
        """Bytes of all copies."""
        return sum(saved.size for saved in self._saved)

    def save(self, slot: int, tokens: Sequence[int], salt: str) -> None:
        """Copy the K/V of `tokens`, the first ones of `slot`. Do nothing if they are too few, if
        there is no room for them, or if an older copy begins with them."""
        size = self._cache.saved_bytes(len(tokens))
        if len(tokens) < MIN_SAVED_TOKENS or size > self._budget:
            return
        found, count = self.match(tokens, salt)
        if found is not None and count == len(tokens):
            self._touch(found)
            return
        same_salt = [saved for saved in self._saved if saved.salt == salt]
        for saved in [
            each for each in same_salt if common_prefix(each.tokens, tokens) == len(each.tokens)
        ]:
            self._drop(saved)  # The new copy begins with these tokens.
        while self.used + size > self._budget or len(self._saved) >= MAX_SAVED_PREFIXES:
            self._drop(self._saved[0])
        try:
            address = self._memory.allocate(size)
        except PassError:
            return
        self._cache.save(slot, len(tokens), address)
        self._saved.append(SavedPrefix(salt, tuple(tokens), address, size))

    def match(self, tokens: Sequence[int], salt: str) -> tuple[SavedPrefix | None, int]:
        """Return the copy with this salt that has the longest prefix in common with `tokens`, and
        the length of that prefix."""
        counts = [common_prefix(s.tokens, tokens) if s.salt == salt else 0 for s in self._saved]
        longest = max(counts, default=0)
        return (self._saved[counts.index(longest)], longest) if longest else (None, 0)

    def load(self, saved: SavedPrefix, slot: int, count: int) -> None:
        """Copy the first `count` tokens' K/V of `saved` into `slot`, which has room for them."""
        self._cache.load(slot, count, saved.address, len(saved.tokens))
        self._touch(saved)

    def _touch(self, saved: SavedPrefix) -> None:
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
    longest, count = min(len(a), len(b)), 0
    while count < longest and list(a[count : count + COMPARED_TOKENS]) == list(
        b[count : count + COMPARED_TOKENS]
    ):
        count += COMPARED_TOKENS
    return next((i for i in range(count, longest) if a[i] != b[i]), longest)
