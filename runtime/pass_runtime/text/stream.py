"""Tokens to text, one at a time, without half characters and without what may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

from pass_runtime.text.automaton import ROOT, Automaton
from pass_runtime.text.detokenizer import Detokenizer
from pass_runtime.text.vocabulary import Vocabulary


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
        self._too_early = min_tokens
        """How many more tokens end nothing."""

    def read(self, token: int) -> tuple[str, str | None]:
        """-> (text that is final now, the stop string that ended it)"""
        may_end = self._too_early == 0
        if not may_end:
            self._too_early -= 1
        if may_end and token in self._special:
            return self._filter.flush(), self._vocabulary.special_text(token)
        return self._filter.push(self._detokenizer.push(token), may_end=may_end)

    def flush(self) -> str:
        """The text that was held back, once no more tokens come."""
        return self._filter.flush()
