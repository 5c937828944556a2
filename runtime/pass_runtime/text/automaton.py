"""Finds words in a growing sequence, with work that depends neither on their number nor on their length."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

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
