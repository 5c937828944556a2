from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from pass_runtime.bundle.reference import sample
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import RowKind, Window

NEAR_TIE = 1e-4
"""Scores that differ by less may be in the other order in a graph."""


def oracle_samples(window: Window, logits, length: int, params: SamplingParams) -> list[int]:
    return [
        int(sample(logits[i][None], np.array([length + row.depth + 1]), params)[0])
        for i, row in enumerate(window.rows)
    ]


def exact_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    p = np.exp(logits.astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p and params.top_p < 1:
            break
        kept.append(token)
        mass += p[token]
    cut = np.zeros_like(p)
    cut[kept] = p[kept]
    cut[cut < params.min_p * p.max()] = 0
    return cut / cut.sum()


def plant_drafts(samples: list[int], drafts: int, accepted: int, vocab: int, rng) -> list[int]:
    """The first `accepted` drafts are those of `samples`, the next one is another."""
    planted = [int(token) for token in rng.integers(0, vocab, drafts)]
    planted[:accepted] = samples[:accepted]
    if accepted < drafts:
        planted[accepted] = (samples[accepted] + 1) % vocab
    return planted


def group_at(window: Window, accepted: int) -> list[int]:
    """Return the look-ahead rows after the first `accepted` drafts."""

    def draft_before(row: int) -> int:
        while window.rows[row].kind is RowKind.LOOKAHEAD:
            row = window.rows[row].parent
        return row

    lookahead = (i for i, row in enumerate(window.rows) if row.kind is RowKind.LOOKAHEAD)
    return [i for i in lookahead if draft_before(i) == accepted]


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
