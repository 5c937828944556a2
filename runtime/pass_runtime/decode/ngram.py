"""Drafts from the text itself: what followed the last time these tokens stood in a row (prompt look-up).

A match is cheap and needs no model. Repetitive text, quotations and code are full of them.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST, SHORTEST = 4, 2
"""Tokens that must agree for a match, tried from LONGEST down."""


class NgramIndex:
    """Every n-gram of a growing token sequence, with the place behind its newest occurrence."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self._match = 0  # the place behind the newest earlier occurrence of the sequence's own end; 0 is none
        self.matched = 0
        """Tokens that agree in the present match, 0 where there is none."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append `tokens`."""
        for token in tokens:
            self._tokens.append(token)
            self._index_end()

    def _index_end(self) -> None:
        """Index the n-grams that end here, and look up where the longest of them ended before."""
        end = len(self._tokens)
        self._match = self.matched = 0
        for size in range(min(LONGEST, end), SHORTEST - 1, -1):
            gram = tuple(self._tokens[-size:])
            if not self._match and gram in self._behind:
                self._match, self.matched = self._behind[gram], size
            self._behind[gram] = end

    def propose(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed the longest, then newest, match; none where nothing matches.

        A match that runs into the end of the sequence goes on with what it has proposed itself: a loop.
        """
        if not self._match or count < 1:
            return ()
        period = len(self._tokens) - self._match
        return tuple(self._tokens[self._match + i % period] for i in range(count))
