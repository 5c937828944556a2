"""Words that a text must not contain: which tokens would complete one, whatever tokens the word falls into."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pass_runtime.text.automaton import ROOT, Automaton

KEPT_MASKS = 64
"""How many states of a text keep their masks, of vocabulary / 8 bytes each."""


class TokenIndex:
    """Finds the tokens that begin with some bytes, and those that contain them. It takes about 120 bytes a token.

    texts: by id, the bytes that a token adds to a text. order: ids in the order of these.
    """

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in order]
        self.order = np.array(order, np.int32)
        self._sizes = np.array([len(text) for text in texts])
        self.longest = int(self._sizes.max(initial=0))
        self._ends = np.cumsum(self._sizes)
        self._token = np.repeat(np.arange(len(texts), dtype=np.int32), self._sizes)
        self._bytes = np.frombuffer(b"".join(texts) + b"\0", np.uint8)
        pairs = self._bytes[:-1].astype(np.uint16) << 8 | self._bytes[1:]
        self._places = np.argsort(pairs, kind="stable").astype(np.int32)
        self._first = np.append(np.searchsorted(pairs[self._places], np.arange(1 << 16)), len(pairs)).tolist()
        """By pair of bytes, where its places in the texts begin in `_places`."""

    def beginning_with(self, text: bytes) -> tuple[int, int]:
        """Where in `order` the tokens that begin with `text` start and end."""
        first = bisect_left(self._sorted, text)
        return first, bisect_right(self._sorted, text, first, key=lambda found: found[: len(text)])

    def containing(self, text: bytes) -> npt.NDArray[np.int32]:
        """The ids of the tokens that contain `text`, some of them several times."""
        if len(text) == 1:
            return self._token[self._places[self._first[text[0] << 8] : self._first[text[0] + 1 << 8]]]
        pairs = [before << 8 | after for before, after in pairwise(text)]
        rarest = min(range(len(pairs)), key=lambda place: self._first[pairs[place] + 1] - self._first[pairs[place]])
        places = self._places[self._first[pairs[rarest]] : self._first[pairs[rarest] + 1]] - rarest
        tokens = self._token[places + rarest]
        inside = (places >= self._ends[tokens] - self._sizes[tokens]) & (places + len(text) <= self._ends[tokens])
        places = places[inside]
        for offset, symbol in enumerate(text):
            places = places[self._bytes[places + offset] == symbol]
        return np.asarray(self._token[places])


class BadWords:
    """The words of a request. A text's state is a number, ROOT at its beginning. Only the thread that decodes asks for
    masks.

    words: bytes, none empty.
    """

    def __init__(self, index: TokenIndex, words: Sequence[bytes]) -> None:
        self._index, self._automaton = index, Automaton(words)
        self._containing = np.zeros(len(index.texts), np.bool_)
        self._completing: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By state, the ranges of tokens that begin with the rest of a word whose beginning is the state's."""
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
        self.forbidden = lru_cache(maxsize=KEPT_MASKS)(self._forbidden)

    def follow(self, state: int, token: int) -> int:
        """The state of a text after its next token."""
        for symbol in self._index.texts[token]:
            state = self._automaton.step(state, symbol)
        return state

    def _forbidden(self, state: int) -> npt.NDArray[np.uint32]:
        """[V/32] bits of the tokens with which the text would contain a word."""
        mask = np.zeros(-(-len(self._containing) // 32) * 32, np.bool_)
        mask[: len(self._containing)] = self._containing
        ranges = set[tuple[int, int]]()
        while state != ROOT:
            ranges.update(self._completing.get(state, ()))
            state = self._automaton.shorter[state]
        taken = 0
        for first, end in sorted(ranges, key=lambda tokens: (tokens[0], -tokens[1])):
            if first >= taken:  # else it lies within the one before: ranges are apart, or one within the other
                mask[self._index.order[first:end]] = True
                taken = end
        return np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32)
