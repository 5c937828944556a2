"""Drafts copied from a text's own earlier tokens (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable

from pass_runtime.backends.base import Drafts

MAX_MATCH_TOKENS, MAX_MATCHES = 32, 8
LONGER_MATCHES = (3, 4, 8, 16)
"""From so many tokens on, a match is one degree surer."""
UNANIMOUS_CONFIDENCE, MAX_CONFIDENCE = 3, 5


class CopyIndex:
    """Finds earlier occurrences of the last tokens. A chain links the occurrences of each pair of
    tokens, as in LZ77 compressors: a token costs constant time and memory."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}  # a pair -> the index after it
        # by a pair's last index: the index after the pair's occurrence before, or 0
        self._previous: list[int] = []
        self._source = 0  # the index of the token that continues the copy in use, or 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if self._source:
                is_copied = self._tokens[self._source] == token
                self._source = self._source + 1 if is_copied else 0
            pair = (self._tokens[-1] if self._tokens else -1, token)
            self._tokens.append(token)
            self._previous.append(self._newest.get(pair, 0))
            self._newest[pair] = len(self._tokens)

    def propose(self, count: int) -> Drafts | None:
        """Return what followed the longest of the matches that agree on the next token. Matches
        vote for it with their length squared. confidence: 0 below 60 % of the votes, else 1 to
        MAX_CONFIDENCE by the match's length; one more if there are several and all agree."""
        matches, votes = self._matches(), dict[int, int]()
        if not matches or count < 1:
            return None
        for end, length in matches.items():
            token = self._tokens[end]
            votes[token] = votes.get(token, 0) + length**2
        chosen = max(votes, key=votes.__getitem__)
        agreeing = [(length, end) for end, length in matches.items() if self._tokens[end] == chosen]
        length, self._source = max(agreeing)
        confidence = 1 + bisect(LONGER_MATCHES, length)
        if 5 * votes[chosen] < 3 * sum(votes.values()):
            confidence = 0
        elif len(matches) == len(agreeing) > 1:
            confidence = min(max(confidence + 1, UNANIMOUS_CONFIDENCE), MAX_CONFIDENCE)
        period = len(self._tokens) - self._source
        tokens = (self._tokens[self._source + i % period] for i in range(count))
        return Drafts(tuple(tokens), "ngram", confidence)

    def _matches(self) -> dict[int, int]:
        """Return the lengths of the newest matches, and of the one in use, by the index after
        each."""
        matches: dict[int, int] = {}
        end = self._previous[-1] if self._previous else 0
        while end and len(matches) < MAX_MATCHES:
            matches[end] = self._match_length(end)
            end = self._previous[end - 1]
        if self._source and self._source not in matches:
            matches[self._source] = self._match_length(self._source)
        return matches

    def _match_length(self, end: int) -> int:
        tokens, last = self._tokens, len(self._tokens)
        longest = min(end, MAX_MATCH_TOKENS)
        if tokens[end - longest : end] == tokens[last - longest :]:
            return longest
        length = 0
        while tokens[end - 1 - length] == tokens[last - 1 - length]:
            length += 1
        return length
