"""Compares the tokens that two plans decoded, and finds the loop in a text.

Both plans should write the same tokens. But windows of different widths round differently, so two
tokens whose scores differ by less than the rounding can change places. The first difference is a
near-tie, and no error, if the margin between the two scores there is at most a tolerance.

Greedy text of small models often loops. Loops are easy to draft, so they are counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pass_runtime.bundle.plan import ar_plan
from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.generation import TokenStream
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

MAX_PERIOD_TOKENS = 48
LOOP_REPEATS, END_LOOP_REPEATS = 3, 2
"""How often a period must occur, one after the other, to be a loop: anywhere in a text, and at the
end of the text, which may cut the loop off."""
MIN_LOOP_TOKENS = 24
"""The fewest tokens of a loop, all repeats together: "no, no, no" is not a loop."""


def loop_start(tokens: Sequence[int]) -> int | None:
    """Return the index in `tokens` at which a loop starts; None if there is no loop. All tokens
    from there on count as looping: a small model hardly ever leaves a loop.

    A loop is a period of at most MAX_PERIOD_TOKENS tokens that occurs LOOP_REPEATS times in a row
    (END_LOOP_REPEATS times at the end of the text), with MIN_LOOP_TOKENS tokens or more in all. It
    starts after the first occurrence of its period.
    """
    starts = (_loop_of_period(tokens, period) for period in range(1, MAX_PERIOD_TOKENS + 1))
    return min((start for start in starts if start is not None), default=None)


def _loop_of_period(tokens: Sequence[int], period: int) -> int | None:
    """Return the index at which the second occurrence of a period of `period` tokens begins; None
    if there is no such loop."""
    repeated, last = 0, len(tokens) - 1
    for i in range(period, len(tokens)):
        # how many tokens up to this one are equal to the token one period before them
        repeated = repeated + 1 if tokens[i] == tokens[i - period] else 0
        min_repeats = END_LOOP_REPEATS if i == last else LOOP_REPEATS
        if repeated + period >= max(min_repeats * period, MIN_LOOP_TOKENS):
            return i - repeated + 1
    return None


MARGIN_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.8}
"""By dtype: the largest margin of a near-tie. Scores are logits / temperature, plus noise."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two token sequences. index: where it is. tokens: what each has there;
    None if it has ended. margin: how far apart the scores of these tokens are; infinite if one
    sequence has ended. tolerance: the largest margin of a near-tie."""

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
    """Run a request to its end, reading the tokens pass by pass as a user would."""
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
    """Return the first difference of `a` and `b`, two continuations of `prompt_ids` that were
    sampled with `options.sampling`; None if they are equal."""
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
    """Return the scores [V] of the token after `prefix`. Plain decoding writes the highest one."""
    one_token = GenerateOptions(
        max_new_tokens=1, sampling=options.sampling, plan="ar", ignore_eos=True
    )
    run_tokens(session, prefix, one_token)
    # The backend still has the logits of that pass, in slot 0.
    logits = session.backend.logits(ar_plan())[0]
    scores: np.ndarray[tuple[int], np.dtype[np.float32]] = gumbel_scores(
        logits, np.array([len(prefix)]), options.sampling
    )[0]
    return scores
