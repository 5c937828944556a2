"""Where a text stands in its grammar: which tokens may follow, within a budget of time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError
from pass_runtime.text.compiler import problem

FIRST_SECONDS = 0.1
ROW_SECONDS = 0.002
"""The CPU time that a text may take for its masks: at first, and with every row of a window. Step limits bound each
mask; this bounds their sum, since the thread that computes them decodes all other texts, too."""


class ConstraintStopped(PassError):
    """A text cannot follow its constraint any further."""


@dataclass
class Usage:
    """seconds: the CPU time of all masks that were computed with one compiled grammar. Its memory grows meanwhile:
    texts share the states of its lexer."""

    seconds: float = 0.0


class GrammarState:
    """The state of one text. Every method raises ConstraintStopped if the grammar is too complex to go on."""

    def __init__(self, matcher: Any, end_tokens: Sequence[int], usage: Usage) -> None:
        self._matcher, self._end_tokens, self._usage = matcher, end_tokens, usage
        self._seconds, self._rows = 0.0, 0

    def copy(self) -> GrammarState:
        """The state of another text, with a budget of its own."""
        return GrammarState(self._matcher.deep_copy(), self._end_tokens, self._usage)

    def advance(self, token: int) -> None:
        """Take the next token of the text."""
        with self._timed():
            if not self._matcher.consume_token(token):
                raise self._stopped()

    def fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        """allowed [P,V/32]: set the bits of the tokens that may follow the text, and the drafts before each row. Rows
        after a draft that the grammar forbids, or that ends the text, are left as they are."""
        with self._timed():
            self._fill(allowed, drafts)

    def _fill(self, allowed: npt.NDArray[np.uint32], drafts: Sequence[int]) -> None:
        taken = 0
        try:
            for row in range(len(allowed)):
                self._rows += 1
                self._matcher.unsafe_compute_mask_ptr(allowed[row].ctypes.data, allowed[row].nbytes)
                if self._matcher.is_error():
                    raise self._stopped()
                if row == len(drafts) or drafts[row] in self._end_tokens:
                    return
                if not self._matcher.try_consume_tokens([drafts[row]]):
                    return
                taken += 1
        finally:
            if taken:
                self._matcher.rollback(taken)

    def forced(self) -> tuple[int, ...]:
        """The only tokens that may follow now, () where there is a choice."""
        with self._timed():
            return tuple(self._matcher.compute_ff_tokens())

    def _stopped(self) -> ConstraintStopped:
        return ConstraintStopped(f"the constraint cannot be followed further: {problem(self._matcher.get_error())}")

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the CPU time of a block. Raises ConstraintStopped if that exceeds the budget."""
        started = time.thread_time()
        yield
        spent = time.thread_time() - started
        self._seconds += spent
        self._usage.seconds += spent
        if self._seconds > FIRST_SECONDS + ROW_SECONDS * self._rows:
            raise ConstraintStopped(
                f"the constraint takes more than {1000 * ROW_SECONDS:g} ms a token to follow, which would slow other "
                "requests down; simplify it"
            )
