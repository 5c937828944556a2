"""Whether two decodings are the same text, and how near a tie was where they first differ.

Windows of different width may round differently, so two candidates whose scores are closer than rounding can swap.
A first difference is a near-tie where the margin between the two candidates is below a tolerance.
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

MARGIN_TOLERANCE = {"float32": 2e-3, "float16": 0.1, "bfloat16": 0.8}
"""Scores (logits / temperature, plus noise) closer than this are a near-tie, by the model's dtype."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two token sequences, and the margin between the scores of the two tokens there."""

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


def run_tokens(session: Session, prompt_ids: Sequence[int], options: GenerateOptions) -> TokenStream:
    """Generate to the end, reading the tokens of every pass as a user would."""
    stream = session.generate_ids(prompt_ids, options)
    for _ in stream:
        pass
    return stream


def first_difference(
    session: Session, prompt_ids: Sequence[int], options: GenerateOptions, a: Sequence[int], b: Sequence[int]
) -> Difference | None:
    """None where `a` and `b`, two continuations of `prompt_ids` under `options.sampling`, are equal."""
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
    """[V] scores of the token after `prefix`, from a plain autoregressive pass; the token drawn is their argmax."""
    one = GenerateOptions(max_new_tokens=1, sampling=options.sampling, plan="ar", ignore_eos=True)
    run_tokens(session, prefix, one)
    logits = session.backend.logits(ar_plan())[0]
    scores: np.ndarray[tuple[int], np.dtype[np.float32]] = gumbel_scores(
        logits, np.array([len(prefix)]), options.sampling
    )[0]
    return scores
