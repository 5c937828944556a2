"""Bad words, which the text of a request must not contain, and the automaton that also finds stop
strings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

ROOT = 0
"""The state of a sequence that does not end with the beginning of a word."""


class Automaton:
    """Aho and Corasick's automaton (1975). Its state stands for the longest suffix of a sequence
    that begins a word.

    words: sequences of symbols, none empty. depth: by state, the length of that suffix. found: by
    state, the length of the longest word that the sequence ends with; 0 if there is none. shorter:
    by state, the state of the next shorter suffix that begins a word.
    """

    def __init__(self, words: Iterable[Sequence[Hashable]]) -> None:
        self._next: dict[tuple[int, Hashable], int] = {}
        self.depth, self.found, self.shorter = [0], [0], [ROOT]
        for word in words:
            state = ROOT
            for symbol in word:
                if (following := self._next.get((state, symbol))) is None:
                    following = self._next[state, symbol] = len(self.depth)
                    self.depth.append(self.depth[state] + 1)
                    self.found.append(0)
                    self.shorter.append(ROOT)
                state = following
            self.found[state] = len(word)
        for (before, symbol), state in sorted(
            self._next.items(), key=lambda edge: self.depth[edge[1]]
        ):
            if before != ROOT:
                self.shorter[state] = self.step(self.shorter[before], symbol)
            self.found[state] = self.found[state] or self.found[self.shorter[state]]

    def step(self, state: int, symbol: Hashable) -> int:
        """The state after one more symbol. Over a whole sequence, this takes at most two look-ups a
        symbol."""
        while (following := self._next.get((state, symbol))) is None:
            if state == ROOT:
                return ROOT
            state = self.shorter[state]
        return following


MAX_CACHED_MASKS = 64
"""For how many states masks are cached, with vocabulary / 8 bytes each."""


class TokenIndex:
    """Finds the tokens that begin with some bytes, or contain them. Its memory is about 120 bytes a
    token.

    texts: by id, the bytes that a token adds to a text. order: the ids, sorted by these bytes.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in order]
        self.order = np.array(order, np.int32)
        self._sizes = np.array([len(text) for text in texts])
        self.longest = int(self._sizes.max(initial=0))
        self._ends = np.cumsum(self._sizes)  # by id, where its bytes end in `_bytes`
        # by place in `_bytes`, the id
        self._token = np.repeat(np.arange(len(texts), dtype=np.int32), self._sizes)
        # the last byte has a pair, too
        self._bytes = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        pairs = self._bytes[:-1].astype(np.uint16) << 8 | self._bytes[1:]
        # in `_bytes`, sorted by the pairs there
        self._places = np.argsort(pairs, kind="stable").astype(np.int32)
        self._first = np.append(
            np.searchsorted(pairs[self._places], np.arange(1 << 16)), len(pairs)
        ).tolist()
        """By pair of bytes, the index in `_places` at which the pair's places begin."""

    def beginning_with(self, text: bytes) -> tuple[int, int]:
        """(start, end) of the tokens in `order` that begin with `text`."""
        first = bisect_left(self._sorted, text)
        return first, bisect_right(self._sorted, text, first, key=lambda found: found[: len(text)])

    def containing(self, text: bytes) -> npt.NDArray[np.int32]:
        """The ids of the tokens that contain `text`. An id may be repeated."""
        if len(text) == 1:
            return self._token[
                self._places[self._first[text[0] << 8] : self._first[text[0] + 1 << 8]]
            ]
        pairs = [before << 8 | after for before, after in pairwise(text)]
        rarest = min(
            range(len(pairs)),
            key=lambda place: self._first[pairs[place] + 1] - self._first[pairs[place]],
        )
        places = self._places[self._first[pairs[rarest]] : self._first[pairs[rarest] + 1]] - rarest
        tokens = self._token[places + rarest]
        inside = (places >= self._ends[tokens] - self._sizes[tokens]) & (
            places + len(text) <= self._ends[tokens]
        )
        places = places[inside]
        for offset, symbol in enumerate(text):
            places = places[self._bytes[places + offset] == symbol]
        return np.asarray(self._token[places])


class BadWords:
    """The bad words of a request. The state of a text is a number, at first ROOT. Only one thread,
    the one that decodes, may ask for masks.

    words: bytes, none empty.
    """

    def __init__(self, index: TokenIndex, words: Sequence[bytes]) -> None:
        self._index, self._automaton = index, Automaton(words)
        self._containing = np.zeros(len(index.texts), np.bool_)
        self._completing: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By state, which is the beginning of a word: ranges in `order` of tokens that begin with
        its rest."""
        for word in dict.fromkeys(words):
            state = ROOT
            for size, symbol in enumerate(word, 1):
                state = self._automaton.step(state, symbol)
                if 0 < len(word) - size <= index.longest:
                    first, end = index.beginning_with(word[size:])
                    if first < end:
                        self._completing[state].append((first, end))
            if len(word) <= index.longest:
                self._containing[index.containing(word)] = True
        self.forbidden = lru_cache(maxsize=MAX_CACHED_MASKS)(self._forbidden)

    def follow(self, state: int, token: int) -> int:
        """The state of a text after its next token."""
        for symbol in self._index.texts[token]:
            state = self._automaton.step(state, symbol)
        return state

    def _forbidden(self, state: int) -> npt.NDArray[np.uint32]:
        """[V/32] uint32: the bits of the tokens after which a text in this state would contain a
        word."""
        mask = np.zeros(-(-len(self._containing) // 32) * 32, np.bool_)
        mask[: len(self._containing)] = self._containing
        ranges = set[tuple[int, int]]()
        while state != ROOT:
            ranges.update(self._completing.get(state, ()))
            state = self._automaton.shorter[state]
        taken = 0
        for first, end in sorted(ranges, key=lambda tokens: (tokens[0], -tokens[1])):
            # else it lies within the one before: ranges are apart, or one within the other
            if first >= taken:
                mask[self._index.order[first:end]] = True
                taken = end
        return np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32)
