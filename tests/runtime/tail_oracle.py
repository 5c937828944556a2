"""What tests of tails expect: numpy's samples, windows with some right drafts, any request."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pass_runtime.bundle.plan import Plan, RowKind
from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams

NEAR_TIE = 1e-4
"""Rounding in float32 may swap scores that are nearer than this."""


def oracle_samples(plan: Plan, logits, length: int, params: SamplingParams) -> list[int]:
    """By row, the token that follows it."""
    return [
        int(sample(logits[i][None], np.array([length + row.depth + 1]), params)[0])
        for i, row in enumerate(plan.rows)
    ]


def plant_drafts(samples: list[int], drafts: int, accepted: int, vocab: int, rng) -> list[int]:
    """Drafts of which the first `accepted` agree with `samples` and the next does not."""
    planted = [int(token) for token in rng.integers(0, vocab, drafts)]
    planted[:accepted] = samples[:accepted]
    if accepted < drafts:
        planted[accepted] = (samples[accepted] + 1) % vocab
    return planted


def group_at(plan: Plan, accepted: int) -> list[int]:
    """The look-ahead rows after the first `accepted` drafts, found by walking up from every row."""

    def chain_depth(row: int) -> int:
        while plan.rows[row].kind is RowKind.LOOKAHEAD:
            row = plan.rows[row].parent
        return row

    lookahead = (i for i, row in enumerate(plan.rows) if row.kind is RowKind.LOOKAHEAD)
    return [i for i in lookahead if chain_depth(i) == accepted]


@st.composite
def sampling_params(draw, sampler: str) -> SamplingParams:
    seed = draw(st.one_of(st.integers(0, 2**64 - 1), st.just(2**64 - 1)))
    if sampler == "greedy":
        return SamplingParams(seed=seed)
    temperature = draw(st.one_of(st.just(0.0), st.floats(0.05, 3.0)))
    if sampler == "sample":
        return SamplingParams(temperature, seed=seed)
    top_k = draw(st.one_of(st.just(0), st.integers(1, 60), st.integers(1, 1024), st.just(1024)))
    top_p = draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999), st.just(1e-6)))
    min_p = draw(st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.just(1.0)))
    return SamplingParams(temperature, top_k, top_p, seed, min_p)
