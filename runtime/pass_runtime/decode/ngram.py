"""N-gram drafts (prompt lookup): the tokens that followed the last time the newest tokens stood in a row.

A match is cheap and needs no model. Repetitive text, quotations and code are full of them.
"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST, SHORTEST = 4, 2
"""The n-grams that are indexed, in tokens; the longest one that matches is used."""


class NgramIndex:
    """Every n-gram of a growing token sequence, with the index of the token that followed its newest occurrence."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._following: dict[tuple[int, ...], int] = {}
        self._match = 0  # the index that followed the n-gram which now ends the sequence; 0 where none matches
        self.matched = 0
        """The length of the present match in tokens, 0 where there is none."""
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
            if not self._match and gram in self._following:
                self._match, self.matched = self._following[gram], size
            self._following[gram] = end

    def propose(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed the longest match, the newest one of that length; () without a match.

        A match close to the end of the sequence proposes the same tokens again and again, as a loop would.
        """
        if not self._match or count < 1:
            return ()
        period = len(self._tokens) - self._match
        return tuple(self._tokens[self._match + i % period] for i in range(count))
