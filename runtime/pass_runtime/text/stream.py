"""The text of one request: stop strings that end it, and bad words that it must not contain."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pass_runtime.text.detokenizer import Detokenizer, Vocabulary

ROOT = 0
"""The state of a sequence whose end begins no word."""


class Automaton:
    """Aho's and Corasick's (1975). A state stands for the longest end of the sequence with which a word begins.

    words: sequences of symbols, none empty. depth: by state, how many symbols that end has. found: by state, the length
    of the longest word that the sequence ends with; 0 if it ends with none. shorter: by state, the state of the next
    shorter end with which a word begins.
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
        for (before, symbol), state in sorted(self._next.items(), key=lambda edge: self.depth[edge[1]]):
            if before != ROOT:
                self.shorter[state] = self.step(self.shorter[before], symbol)
            self.found[state] = self.found[state] or self.found[self.shorter[state]]

    def step(self, state: int, symbol: Hashable) -> int:
        """-> the state with `symbol` at the end. Over a whole sequence this looks up two symbols at most for each."""
        while (following := self._next.get((state, symbol))) is None:
            if state == ROOT:
                return ROOT
            state = self.shorter[state]
        return following


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._beginnings = frozenset(stop[0] for stop in stops if stop)
        self._state = ROOT
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """-> (text to show, the stop string that ended it). The stop that is complete first counts; it is not shown.
        may_end: whether a stop that is complete within `text` counts."""
        if self._state == ROOT and self._beginnings.isdisjoint(text):  # the usual case
            return text, None
        automaton, state = self._automaton, self._state
        for place, character in enumerate(text, 1):
            state = automaton.step(state, character)
            if may_end and (size := automaton.found[state]):
                seen = self._held + text[:place]
                self._state, self._held = ROOT, ""
                return seen[:-size], seen[-size:]
        self._state, seen = state, self._held + text
        shown = len(seen) - automaton.depth[state]
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """The text that was held back, once no more text comes."""
        shown, self._held, self._state = self._held, "", ROOT
        return shown


@lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> Automaton:
    """Shared by the requests with these stop strings."""
    return Automaton(stops)


class TextStream:
    """The text of one request, token by token.

    stop: strings that end it and are not part of it. min_tokens: one that is complete within so many tokens does not
    count. A stop string that is the text of a special token ends at that token, though special tokens are not shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """tokenizer: or its vocabulary, which takes milliseconds to make."""
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._filter = StopFilter(stop)
        self._special = {token for string in stop if (token := self._vocabulary.special(string)) is not None}
        self._detokenizer = Detokenizer(self._vocabulary, prompt_ids)
        self._tokens_before_stop = min_tokens
        """How many more tokens end nothing."""

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (text that is final now, the stop string that ended it)"""
        may_end = self._tokens_before_stop == 0
        if not may_end:
            self._tokens_before_stop -= 1
        if may_end and token in self._special:
            return self._filter.flush(), self._vocabulary.special_text(token)
        return self._filter.push(self._detokenizer.push(token), may_end=may_end)

    def flush(self) -> str:
        """The text that was held back, once no more tokens come."""
        return self._filter.flush()


MAX_CACHED_MASKS = 64
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
        self.forbidden = lru_cache(maxsize=MAX_CACHED_MASKS)(self._forbidden)

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
