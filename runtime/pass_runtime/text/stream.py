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


class StopFilter:
    """Holds back the end of the text while it may still grow into a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _automaton(tuple(stop for stop in stops if stop))
        self._beginnings = frozenset(stop[0] for stop in stops if stop)
        self._state = ROOT
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text to show, and the stop string that ended it or None. The stop string that
        is complete first ends the text, and is not shown.

        may_end: whether a stop string that `text` completes ends it."""
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
        """The text that was held back. Call it after the last `push`."""
        shown, self._held, self._state = self._held, "", ROOT
        return shown


@lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> Automaton:
    """The automaton that requests with these stop strings share."""
    return Automaton(stops)


class TextStream:
    """The text of one request, token by token.

    stop: strings that end the text and are not part of it. A stop string that is the text of a
    special token ends the text at that token, although special tokens are not shown, but for
    shown_special_tokens. min_tokens: how many tokens do not end the text at first.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | Vocabulary,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        shown_special_tokens: Sequence[int] = (),
    ) -> None:
        """tokenizer: a tokenizer, from which a vocabulary is made in milliseconds, or a
        vocabulary."""
        self._vocabulary = tokenizer if isinstance(tokenizer, Vocabulary) else Vocabulary(tokenizer)
        self._filter = StopFilter(stop)
        self._special = {
            token for string in stop if (token := self._vocabulary.special(string)) is not None
        }
        self._detokenizer = Detokenizer(self._vocabulary, prompt_ids, shown_special_tokens)
        self._tokens_before_stop = min_tokens
        """How many more tokens do not end the text."""

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (text that is final now, the stop string that ended it)"""
        may_end = self._tokens_before_stop == 0
        if not may_end:
            self._tokens_before_stop -= 1
        if may_end and token in self._special:
            return self._filter.flush(), self._vocabulary.special_text(token)
        return self._filter.push(self._detokenizer.push(token), may_end=may_end)

    def flush(self) -> str:
        """The text that was held back. Call it after the last token."""
        return self._filter.flush()


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
        self._token = np.repeat(
            np.arange(len(texts), dtype=np.int32), self._sizes
        )  # by place in `_bytes`, the id
        self._bytes = np.frombuffer(
            b"".join(texts) + b"\0", np.uint8
        )  # the last byte has a pair, too
        pairs = self._bytes[:-1].astype(np.uint16) << 8 | self._bytes[1:]
        self._places = np.argsort(pairs, kind="stable").astype(
            np.int32
        )  # in `_bytes`, sorted by the pairs there
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
            if (
                first >= taken
            ):  # else it lies within the one before: ranges are apart, or one within the other
                mask[self._index.order[first:end]] = True
                taken = end
        return np.packbits(mask, bitorder="little").view("<u4").astype(np.uint32)
