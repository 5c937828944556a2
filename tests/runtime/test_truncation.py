from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tail_runs import open_graph, request_feed, run_graph
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pass_exporter.tails.sampler import SamplerNodes
from pass_exporter.tails.tape import GraphTape
from pass_exporter.tails.truncation import FIRST_CANDIDATES
from pass_runtime.bundle.reference import kept_tokens
from pass_runtime.bundle.sampling import MAX_CANDIDATES, SamplingParams

ROWS = 3
ROUNDING = 1e-5


@lru_cache
def weights_session(vocab: int, normalized: bool) -> ort.InferenceSession:
    op = GraphTape("weights")
    logits = op.input("logits", np.float32, ["batch", ROWS, vocab])
    weights = SamplerNodes(op, "truncated", vocab).weights(logits, ROWS, normalized=normalized)
    return open_graph(op.model({"weights": (weights, np.float32, ["batch", ROWS, vocab])}))


def graph_weights(
    logits: np.ndarray, params: list[SamplingParams], *, normalized: bool = False
) -> np.ndarray:
    feed = request_feed(params) | {"logits": logits}
    return run_graph(weights_session(logits.shape[2], normalized), feed)["weights"]


def numpy_kept(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scaled = logits / np.float32(params.temperature)
    return kept_tokens(scaled - scaled.max(-1, keepdims=True), params)


def transformers_kept(logits: np.ndarray, params: SamplingParams, slack: float) -> np.ndarray:
    warpers = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(min(1.0, params.top_p * (1 + slack))))
    if params.min_p:
        warpers.append(MinPLogitsWarper(min(1.0, params.min_p * (1 - slack))))
    scores = torch.from_numpy(logits.astype(np.float64))
    for warper in warpers:
        scores = warper(torch.zeros(len(logits), 1, dtype=torch.long), scores)
    return (scores > -torch.inf).numpy()


@st.composite
def truncations(draw) -> SamplingParams:
    return SamplingParams(
        draw(st.floats(0.3, 1.5)),
        draw(st.one_of(st.just(0), st.integers(1, 60), st.integers(1, 1024))),
        draw(st.one_of(st.just(1.0), st.floats(0.05, 0.97))),
        min_p=draw(st.sampled_from([0.0, 1.0]) | st.floats(1e-6, 1e-3) | st.floats(1e-3, 1.0)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [37, 1501, 20_000])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(params=st.lists(truncations(), min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_the_tokens_of_transformers_are_kept(vocab, params, seed):
    assume(all(p.sampler == "truncated" for p in params))
    logits = np.random.default_rng(seed).normal(0, 3, (len(params), ROWS, vocab)).astype(np.float32)
    from_graph = graph_weights(logits, params) > 0
    for b, own in enumerate(params):
        certain, possible = (
            transformers_kept(logits[b], own, slack) for slack in (-ROUNDING, ROUNDING)
        )
        if own.top_p < 1 and not own.top_k:
            assume(possible.sum(-1).max() <= MAX_CANDIDATES)  # top-p alone keeps no more
        for kept in (numpy_kept(logits[b], own), from_graph[b]):
            assert (certain <= kept).all(), own
            assert (kept <= possible).all(), own


STAIRS = 1200
"""Tokens whose probabilities fall in steps; all others have next to none."""


@st.composite
def requests_on_stairs(draw) -> tuple[SamplingParams, float, int]:
    slope = draw(st.sampled_from([0.0, 0.002, 0.01, 0.05, 0.3]))
    edges = [edge + i for edge in (FIRST_CANDIDATES, MAX_CANDIDATES) for i in (-2, -1, 0, 1, 2)]
    step = draw(st.one_of(st.sampled_from(edges), st.integers(1, STAIRS)))
    top_k = draw(
        st.one_of(st.just(0), st.sampled_from([1, *(k for k in edges if k <= MAX_CANDIDATES)]))
    )
    shares = np.exp(-slope * np.arange(STAIRS))
    shares /= shares[: top_k or STAIRS].sum()
    step = min(step, int((shares > 1e-4).sum()))  # float32 sums do not distinguish later steps
    mid_step = shares[:step].sum() - shares[step - 1] / 2
    top_p = draw(st.one_of(st.just(1.0), st.just(float(min(1.0, mid_step)))))
    min_p = draw(st.one_of(st.just(0.0), st.just(float(np.exp(-slope * (step - 0.5))))))
    return SamplingParams(1.0, top_k, top_p, min_p=min_p), slope, step


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [2048, 20_000, 20_001])
@settings(derandomize=True, deadline=None, max_examples=150)
@given(cases=st.lists(requests_on_stairs(), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_the_same_tokens_are_kept_whether_or_not_the_first_candidates_suffice(vocab, cases, seed):
    params, rng = [case[0] for case in cases], np.random.default_rng(seed)
    logits = np.full((len(cases), ROWS, vocab), -30, np.float32)
    for b, (_, slope, _) in enumerate(cases):
        for row in range(ROWS):
            logits[b, row, rng.permutation(vocab)[:STAIRS]] = -slope * np.arange(STAIRS)
    kept = graph_weights(logits, params) > 0
    for b, (own, slope, step) in enumerate(cases):
        if own.sampler == "truncated":
            assert np.array_equal(kept[b], numpy_kept(logits[b], own)), own
        if slope and own.top_p < 1 and not own.top_k and not own.min_p:
            assert (kept[b].sum(-1) == min(step, MAX_CANDIDATES)).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("min_p", [0.3, 1.0])
def test_ties_at_the_edge_of_min_p_are_kept(min_p, temperature):
    logits = np.full((1, ROWS, 37), -9, np.float32)
    logits[..., [3, 8, 21]] = 4
    weights = graph_weights(logits, [SamplingParams(temperature, min_p=min_p)])[0, 0]
    assert np.flatnonzero(weights).tolist() == [3, 8, 21]


def test_min_p_alone_may_keep_more_than_max_candidates():
    logits = np.random.default_rng(1).normal(0, 0.1, (2, ROWS, 20_000)).astype(np.float32)
    params = [SamplingParams(1.0, min_p=0.01), SamplingParams(1.0)]
    assert (graph_weights(logits, params) > 0).all()
    assert numpy_kept(logits[0], params[0]).all()


@pytest.mark.parametrize("vocab", [37, 1501])
def test_normalized_weights_of_truncated_rows_add_up_to_one_and_others_are_unchanged(vocab):
    logits = np.random.default_rng(2).normal(0, 3, (2, ROWS, vocab)).astype(np.float32)
    params = [SamplingParams(0.7, min_p=0.05), SamplingParams(0.7)]
    truncated, complete = graph_weights(logits, params, normalized=True)
    assert np.allclose(truncated.sum(-1), 1, atol=1e-6)
    assert not truncated.all()
    assert np.array_equal(complete, graph_weights(logits, params)[1])


def test_min_p_needs_the_truncated_sampler_unless_the_request_is_greedy():
    for min_p, sampler in ((0.0, "sample"), (1e-9, "truncated"), (1.0, "truncated")):
        assert SamplingParams(1.0, min_p=min_p).sampler == sampler
        assert SamplingParams(0.0, min_p=min_p).sampler == "greedy"
