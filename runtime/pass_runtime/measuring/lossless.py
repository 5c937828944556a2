"""Compares the tokens of two plans, and finds the loop in a text.

Windows round differently by width, so tokens of almost equal scores can change places: a
near-tie, and no error. Loops are easy to draft, so they are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.bundle.window import ar_window
from pass_runtime.generation import TokenStream
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

MAX_PERIOD_TOKENS = 48
LOOP_REPEATS, END_LOOP_REPEATS = 3, 2
"""Periods in a row that make a loop: anywhere, and at the end of a text."""
MIN_LOOP_TOKENS = 24
""""no, no, no" is not one."""


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return the index after a loop's first period, or None. All later tokens count as looping:
    a small model hardly ever leaves a loop."""
    starts = (_loop_of_period(tokens, period) for period in range(1, MAX_PERIOD_TOKENS + 1))
    return min((start for start in starts if start is not None), default=None)


def _loop_of_period(tokens: Sequence[int], period: int) -> int | None:
    repeated, last = 0, len(tokens) - 1
    for i in range(period, len(tokens)):
        repeated = repeated + 1 if tokens[i] == tokens[i - period] else 0
        min_repeats = END_LOOP_REPEATS if i == last else LOOP_REPEATS
        if repeated + period >= max(min_repeats * period, MIN_LOOP_TOKENS):
            return i - repeated + 1
    return None


MARGIN_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.8}


@dataclass(frozen=True)
class Difference:
    """tokens: None at an end. margin: of the scores. tolerance: the largest of a near-tie."""

    index: int
    tokens: tuple[int | None, int | None]
    margin: float
    tolerance: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= self.tolerance

    def __str__(self) -> str:
        verdict = "a near-tie" if self.is_near_tie else "NOT a near-tie"
        return (
            f"token {self.index}: {self.tokens[0]} against {self.tokens[1]}, "
            f"margin {self.margin:.2g} ({verdict}; tolerance {self.tolerance:g})"
        )


def run_tokens(
    session: Session, prompt_ids: Sequence[int], options: GenerateOptions
) -> TokenStream:
    stream = session.generate_ids(prompt_ids, options)
    for _ in stream:
        pass
    return stream


def first_difference(
    session: Session,
    prompt_ids: Sequence[int],
    options: GenerateOptions,
    a: Sequence[int],
    b: Sequence[int],
) -> Difference | None:
    """Return the first difference of two continuations, or None."""
    if list(a) == list(b):
        return None
    shared = min(len(a), len(b))
    index = next((i for i in range(shared) if a[i] != b[i]), shared)
    first, second = (ids[index] if index < len(ids) else None for ids in (a, b))
    tolerance = MARGIN_TOLERANCE[session.manifest.model.dtype]
    if first is None or second is None:
        return Difference(index, (first, second), float("inf"), tolerance)
    prefix = [*prompt_ids, *a[:index]]
    scores = token_scores(session, prefix, options)
    return Difference(index, (first, second), abs(float(scores[first] - scores[second])), tolerance)


def token_scores(
    session: Session, prefix: Sequence[int], options: GenerateOptions
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return the scores [V] after `prefix`; plain decoding writes the highest."""
    one_token = GenerateOptions(
        max_new_tokens=1, sampling=options.sampling, plan="ar", ignore_eos=True
    )
    run_tokens(session, prefix, one_token)
    # The backend still has them, in slot 0.
    logits = session.backend.logits(ar_window())[0]
    scores: np.ndarray[tuple[int], np.dtype[np.float32]] = gumbel_scores(
        logits, np.array([len(prefix)]), options.sampling
    )[0]
    return scores
