"""Whether two decodings are the same text, how close the scores are where they first differ, and
where a text loops.

Windows of different widths round differently, so two tokens whose scores differ by less than the
rounding can change places. A first difference is a near-tie if the margin between the two scores is
at most a tolerance. Greedy text of small models loops, and loops are easy to draft.
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
    run, last = 0, len(tokens) - 1
    for i in range(period, len(tokens)):
        run = run + 1 if tokens[i] == tokens[i - period] else 0
        times = END_LOOP_REPEATS if i == last else LOOP_REPEATS
        if run >= max((times - 1) * period, MIN_LOOP_TOKENS - period):
            return i - run + 1
    return None


MARGIN_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.8}
"""By dtype: scores (logits / temperature, plus noise) closer than this are a near-tie."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two token sequences, and the margin of the two scores there."""

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
    """Generate to the end, reading the tokens pass by pass, as a user would."""
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
    """The first difference of `a` and `b`, two continuations of `prompt_ids` by `options.sampling`;
    None if equal."""
    if list(a) == list(b):
        return None
    shared = min(len(a), len(b))
    index = next((i for i in range(shared) if a[i] != b[i]), shared)
    tokens = tuple(ids[index] if index < len(ids) else None for ids in (a, b))
    tolerance = MARGIN_TOLERANCE[session.manifest.model.dtype]
    first, second = tokens
    if first is None or second is None:  # one of them ended earlier
        return Difference(index, (first, second), float("inf"), tolerance)
    prefix = [*prompt_ids, *a[:index]]
    scores = token_scores(session, prefix, options)
    return Difference(index, (first, second), abs(float(scores[first] - scores[second])), tolerance)


def token_scores(
    session: Session, prefix: Sequence[int], options: GenerateOptions
) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """[V] scores of the token after `prefix` in plain decoding, which draws their argmax."""
    one_token = GenerateOptions(
        max_new_tokens=1, sampling=options.sampling, plan="ar", ignore_eos=True
    )
    run_tokens(session, prefix, one_token)
    logits = session.backend.logits(ar_plan())[0]
    scores: np.ndarray[tuple[int], np.dtype[np.float32]] = gumbel_scores(
        logits, np.array([len(prefix)]), options.sampling
    )[0]
    return scores
