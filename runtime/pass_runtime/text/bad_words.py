"""Finds the tokens that would complete a bad word, which a text must not contain."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import OfOneProcess

ROOT = 0


class Automaton:
    """Finds words in a sequence (Aho, Corasick 1975). A state stands for the longest suffix with
    which a word begins. By state: depth, its length; word_length, that of the longest word at the
    end, or 0; shorter, the state of the next shorter suffix."""

    def __init__(self, words: Iterable[Sequence[Hashable]]) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        self.depth, self.word_length, self.shorter = [0], [0], [ROOT]
        for word in words:
            state = ROOT
            for symbol in word:
                if (following := self._next.get((state, symbol))) is None:
                    following = self._next[state, symbol] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self.word_length.append(0)
                    self.shorter.append(ROOT)
                state = following
            self.word_length[state] = len(word)
        # States of less depth first, which `step` needs.
        edges = sorted(self._next.items(), key=lambda edge: self.depth[edge[1]])
        for (before, symbol), state in edges:
            if before != ROOT:
                self.shorter[state] = self.step(self.shorter[before], symbol)
            if not self.word_length[state]:
                self.word_length[state] = self.word_length[self.shorter[state]]

    def step(self, state: int, symbol: Hashable) -> int:
        while (following := self._next.get((state, symbol))) is None:
            if state == ROOT:
                return ROOT
            state = self.shorter[state]
        return following


MAX_CACHED_MASKS = 64


class TokenIndex:
    """Finds tokens by the places of every pair of bytes. order: the ids sorted by their bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in order]
        self.order = np.array(order, np.int32)
        self._sizes = np.array([len(text) for text in texts])
        self.longest = int(self._sizes.max(initial=0))
        self._bytes = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        self._ends = np.cumsum(self._sizes)  # by id, where its bytes end in `_bytes`
        self._token = np.repeat(np.arange(len(texts), dtype=np.int32), self._sizes)
        pairs = self._bytes[:-1].astype(np.uint16) << 8 | self._bytes[1:]
        # Indices in `_bytes`, sorted by the pair of bytes that begins there.
        self._places = np.argsort(pairs, kind="stable").astype(np.int32)
        self._first = np.append(
            np.searchsorted(pairs[self._places], np.arange(1 << 16)), len(pairs)
        ).tolist()

    def beginning_with(self, text: bytes) -> tuple[int, int]:
        """Return (start, end) in `order` of the tokens that begin with `text`."""
        start = bisect_left(self._sorted, text)
        return start, bisect_right(self._sorted, text, start, key=lambda each: each[: len(text)])

    def containing(self, text: bytes) -> npt.NDArray[np.int32]:
        """Return the ids of the tokens that contain `text`, perhaps repeated."""
        if len(text) == 1:  # All pairs that begin with this byte follow one another.
            start, end = self._first[text[0] << 8], self._first[text[0] + 1 << 8]
            return self._token[self._places[start:end]]
        pairs = [before << 8 | after for before, after in pairwise(text)]
        counts = [self._first[pair + 1] - self._first[pair] for pair in pairs]
        rarest = counts.index(min(counts))
        places = self._places[self._first[pairs[rarest]] : self._first[pairs[rarest] + 1]] - rarest
        tokens = self._token[places + rarest]
        is_inside_token = (places >= self._ends[tokens] - self._sizes[tokens]) & (
            places + len(text) <= self._ends[tokens]
        )
        places = places[is_inside_token]
        for offset, symbol in enumerate(text):
            places = places[self._bytes[places + offset] == symbol]
        return np.asarray(self._token[places])


class BadWords(OfOneProcess):
    """The bad words of a request, none empty. A text has the state of an automaton over its bytes.
    Only the thread that decodes may ask for masks."""

    def __init__(self, index: TokenIndex, words: Sequence[bytes]) -> None:
        self._index, self._automaton = index, Automaton(words)
        self._containing = np.zeros(len(index.texts), np.bool_)
        self._completing: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By state: ranges in `order` of the tokens that complete a word."""
        for word in dict.fromkeys(words):
            state = ROOT
            for size, symbol in enumerate(word, 1):
                state = self._automaton.step(state, symbol)
                if 0 < len(word) - size <= index.longest:
                    start, end = index.beginning_with(word[size:])
                    if start < end:
                        self._completing[state].append((start, end))
            if len(word) <= index.longest:
                self._containing[index.containing(word)] = True
        self.forbidden = lru_cache(maxsize=MAX_CACHED_MASKS)(self._forbidden)

    def follow(self, state: int, token: int) -> int:
        for symbol in self._index.texts[token]:
            state = self._automaton.step(state, symbol)
        return state

    def _forbidden(self, state: int) -> npt.NDArray[np.uint32]:
        mask = np.zeros(-(-len(self._containing) // 32) * 32, np.bool_)
        mask[: len(self._containing)] = self._containing
        ranges = set[tuple[int, int]]()
        while state != ROOT:
            ranges.update(self._completing.get(state, ()))
            state = self._automaton.shorter[state]
        masked = 0
        for start, end in sorted(ranges, key=lambda each: (each[0], -each[1])):
            # Two ranges are apart, or one lies within the other.
            if start >= masked:
                mask[self._index.order[start:end]] = True
                masked = end
        return np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32)
