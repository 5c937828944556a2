"""Logits processors on the host: before a pass, they say which tokens each row may draw, and
which logits change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pass_runtime.backends.base import ProcessedRows
from pass_runtime.bundle.sampling import TOKEN_LIST_SIZES, SamplingParams

if TYPE_CHECKING:
    from pass_runtime.text.bad_words import BadWords
    from pass_runtime.text.grammar import GrammarState

Bits = npt.NDArray[np.uint32]
"""[...,V/32]: sets of tokens."""


@dataclass(frozen=True)
class Processing:
    """grammar: the state of an empty text. end_tokens: not drawn before min_tokens tokens.
    bad_words: strings that the text does not contain. allowed_token_ids: empty allows all."""

    vocab_size: int
    sampling: SamplingParams
    grammar: GrammarState | None = None
    min_tokens: int = 0
    end_tokens: frozenset[int] = frozenset()
    bad_words: BadWords | None = None
    allowed_token_ids: tuple[int, ...] = ()


class Processors:
    """For one sequence, on the thread that decodes."""

    def __init__(self, processing: Processing, prompt: Sequence[int]) -> None:
        self._processing, self._prompt_length = processing, len(prompt)
        self._grammar = None if processing.grammar is None else processing.grammar.copy()
        self._token_counts = Counter[int]()  # in the text, without the prompt
        # in prompt and text
        self._seen = set(prompt) if processing.sampling.repetition_penalty != 1 else set[int]()
        self._num_read = len(prompt)
        self._word_state = 0  # in the bad-word matcher
        self._allowed_ids = np.zeros_like(_all_tokens(processing.vocab_size))
        _add(self._allowed_ids, processing.allowed_token_ids)
        # an ordered set: tokens whose logits may change
        self._touched = dict.fromkeys((*processing.sampling.logit_bias, *sorted(self._seen)))

    def list_size(self, drafts: int) -> int:
        """Return T, the smallest of TOKEN_LIST_SIZES that is enough for `drafts` drafts."""
        count = len(self._touched) + drafts
        return next(size for size in TOKEN_LIST_SIZES if size >= count)

    def read(self, tokens: Sequence[int]) -> None:
        """Read new `tokens` of prompt and text. Raises ConstraintStopped as `GrammarState` does."""
        for token in tokens[self._num_read :]:
            self._num_read += 1
            self._token_counts[token] += 1
            if self._processing.sampling.penalizes:
                self._touched[token] = None
            if self._processing.sampling.repetition_penalty != 1:
                self._seen.add(token)
            self._word_state = self._follow(self._word_state, token)
            if self._grammar is not None and token not in self._processing.end_tokens:
                self._grammar.advance(token)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next."""
        return () if self._grammar is None else self._grammar.forced()

    def rows(self, tokens: Sequence[int], drafts: Sequence[int], size: int) -> ProcessedRows:
        """Row i follows `tokens` (prompt and text) and the first i of `drafts`."""
        self.read(tokens)
        vocab, rows = self._processing.vocab_size, len(drafts) + 1
        if vocab in drafts:
            drafts = drafts[: drafts.index(vocab)]
        # [rows,V/32] -> [rows,V/8]: bytes, each as an int32
        bits = self._allowed(tokens, drafts, rows).astype("<u4").view(np.uint8)
        allowed = bits[:, : (vocab + 7) // 8].astype(np.int32)
        return ProcessedRows(allowed, *self._changes(drafts, rows, size))

    def _allowed(self, tokens: Sequence[int], drafts: Sequence[int], rows: int) -> Bits:
        """[rows,V/32]."""
        allowed = np.tile(_all_tokens(self._processing.vocab_size), (rows, 1))
        if self._grammar is not None:
            self._grammar.fill(allowed, drafts)
        if self._processing.allowed_token_ids:
            _restrict(allowed, self._allowed_ids)
        if self._processing.bad_words or self._processing.min_tokens:
            state, written = self._word_state, len(tokens) - self._prompt_length
            for row in range(len(drafts) + 1):
                _restrict(allowed[row : row + 1], ~self._forbidden(state, written + row))
                if row < len(drafts):
                    state = self._follow(state, drafts[row])
        return allowed

    def _follow(self, state: int, token: int) -> int:
        words = self._processing.bad_words
        return state if words is None else words.follow(state, token)

    def _forbidden(self, state: int, written: int) -> Bits:
        words = self._processing.bad_words
        forbidden = np.zeros_like(self._allowed_ids) if words is None else words.forbidden(state)
        if written < self._processing.min_tokens:
            forbidden = forbidden.copy()
            _add(forbidden, self._processing.end_tokens)
        return forbidden

    def _changes(
        self, drafts: Sequence[int], rows: int, size: int
    ) -> tuple[
        npt.NDArray[np.int64],
        npt.NDArray[np.float32],
        npt.NDArray[np.float32],
        npt.NDArray[np.float32],
    ]:
        """Return touched [size], bias [size], factor [rows,size] and penalty [rows,size]."""
        sampling = self._processing.sampling
        ids = list(
            dict.fromkeys((*self._touched, *drafts)) if sampling.penalizes else self._touched
        )
        touched, bias = np.zeros(size, np.int64), np.zeros(size, np.float32)
        factor, penalty = np.ones((rows, size), np.float32), np.zeros((rows, size), np.float32)
        touched[: len(ids)] = ids
        bias[: len(ids)] = [sampling.logit_bias.get(token, 0.0) for token in ids]
        if sampling.penalizes:
            counts = np.zeros((rows, len(ids)), np.float32)
            counts[:] = [self._token_counts[token] for token in ids]
            for row, draft in enumerate(drafts, 1):
                counts[row:, ids.index(draft)] += 1
            seen = np.array([token in self._seen for token in ids], np.bool_) | (counts > 0)
            factor[:, : len(ids)] = np.where(
                seen, np.float32(sampling.repetition_penalty), np.float32(1)
            )
            present = np.float32(sampling.presence_penalty) * (counts > 0)
            penalty[:, : len(ids)] = np.float32(sampling.frequency_penalty) * counts + present
        if ids:  # Unused entries repeat the first: the graph sets the same value.
            for values in (touched, bias, factor, penalty):
                values[..., len(ids) :] = values[..., :1]
        return touched, bias, factor, penalty


def no_processing(vocab_size: int, rows: int, size: int) -> ProcessedRows:
    """For slots without processors. size: T."""
    allowed = np.full((rows, (vocab_size + 7) // 8), 255, np.int32)
    touched, bias = np.zeros(size, np.int64), np.zeros(size, np.float32)
    factor, penalty = np.ones((rows, size), np.float32), np.zeros((rows, size), np.float32)
    return ProcessedRows(allowed, touched, bias, factor, penalty)


def _restrict(allowed: Bits, listed: Bits) -> None:
    """Forbid tokens that are not in `listed` [V/32], unless that would leave a row no token."""
    restricted = allowed & listed
    has_token = restricted.any(-1)
    allowed[has_token] = restricted[has_token]


@lru_cache(maxsize=4)
def _all_tokens(vocab_size: int) -> Bits:
    bits = np.packbits(np.arange(-(-vocab_size // 32) * 32) < vocab_size, bitorder="little")
    return bits.view("<u4").astype(np.uint32)


def _add(bits: Bits, tokens: Sequence[int] | set[int] | frozenset[int]) -> None:
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
