from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from tail_oracle import exact_probabilities
from tail_runs import open_graph, run_graph

import pass_exporter.tails.rejection as rejection
from pass_runtime.bundle.noise import STREAMS, noise_offsets
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.bundle.window import Window, draft_window, fused_window, verify_window

VOCAB, REQUESTS = 12, 200_000
SIGNIFICANCE = 1e-4
RNG = np.random.default_rng(5)
TARGET = RNG.normal(0, 1.2, (3, VOCAB)).astype(np.float32)
"""[3,V] logits of the model: of the root, after the first draft, and after the second."""
DRAFT = (TARGET[1:] + RNG.normal(0, 1.0, (2, VOCAB))).astype(np.float32)
"""[2,V] logits that the two drafts are drawn from: they agree with TARGET[1:] only roughly."""
CASES = {"plain": (0, 1.0, 0.0), "top-k and top-p": (5, 0.9, 0.0), "min-p": (0, 1.0, 0.15)}
"""top-k, top-p and min-p of a request."""


def run(window: Window, case: str, feed: dict) -> dict[str, np.ndarray]:
    sampler = "sample" if case == "plain" else "truncated"
    return run_graph(open_graph(rejection.build_rejection_tail(window, sampler, VOCAB)), feed)


def request(case: str, shared_stream: bool = False) -> dict:
    top_k, top_p, min_p = CASES[case]
    positions = np.arange(REQUESTS * 9, dtype=np.int64)
    streams = {name: noise_offsets(1, positions, name).reshape(REQUESTS, 9, 2) for name in STREAMS}
    if shared_stream:
        streams["draft_offsets"] = streams["noise_offsets"]
    return streams | {
        "length": np.zeros(REQUESTS, np.int64),
        "active": np.ones(REQUESTS, np.int64),
        "temperature": np.full(REQUESTS, 0.8, np.float32),
        "top_k": np.full(REQUESTS, top_k, np.int64),
        "top_p": np.full(REQUESTS, top_p, np.float32),
        "min_p": np.full(REQUESTS, min_p, np.float32),
    }


def rows(*logits: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.stack(logits), (REQUESTS, len(logits), VOCAB))


def two_pass(
    case: str, draft: np.ndarray = DRAFT, *, shared_stream: bool = False
) -> tuple[dict, dict]:
    feed = request(case, shared_stream)
    first = run(draft_window(2), case, feed | {"logits": rows(TARGET[0], *draft)})
    feed |= {"logits": rows(TARGET[1], TARGET[2], TARGET[2]), "input_ids": first["next_ids"]}
    feed |= {"draft_probs": first["next_draft_probs"], "length": first["next_length"]}
    return first, run(verify_window(2), case, feed)


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[expected == 0].any()
    kept = expected > 0
    return float(stats.chisquare(counts[kept], expected[kept] * len(tokens)).pvalue)


def expected(logits: np.ndarray, case: str) -> np.ndarray:
    top_k, top_p, min_p = CASES[case]
    return exact_probabilities(logits, SamplingParams(0.8, top_k, top_p, min_p=min_p))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_distributed_as_direct_samples(case):
    first, second = two_pass(case)
    assert p_value(first["emitted"][:, 0], expected(TARGET[0], case)) > SIGNIFICANCE
    assert p_value(first["next_ids"][:, 1], expected(DRAFT[0], case)) > SIGNIFICANCE
    assert p_value(second["emitted"][:, 0], expected(TARGET[1], case)) > SIGNIFICANCE
    for accepted in (1, 2):
        # the token after so many accepted drafts, in the requests that accept as many
        tokens = second["emitted"][second["count"] > accepted, accepted]
        assert len(tokens) > 2000
        assert p_value(tokens, expected(TARGET[2], case)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_drafts_are_accepted_as_often_as_can_be(case):
    _, second = two_pass(case)
    p, q = expected(TARGET[1], case), expected(DRAFT[0], case)
    max_rate = float(np.minimum(p, q).sum())
    assert 0.2 < max_rate < 0.9
    deviation = np.sqrt(max_rate * (1 - max_rate) / REQUESTS)
    assert (second["count"] > 1).mean() == pytest.approx(max_rate, abs=4 * deviation)


@pytest.mark.slow
def test_every_draft_of_the_models_own_distribution_is_accepted():
    _, second = two_pass("plain", np.stack([TARGET[1], TARGET[2]]))
    assert (second["count"] == 3).all()
    assert p_value(second["emitted"][:, 0], expected(TARGET[1], "plain")) > SIGNIFICANCE


@pytest.mark.slow
def test_resampling_from_p_is_caught(monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda _op, p, _q: p)
    _, second = two_pass("plain")
    assert p_value(second["emitted"][:, 0], expected(TARGET[1], "plain")) < SIGNIFICANCE


@pytest.mark.slow
def test_a_stream_shared_by_drafting_and_resampling_is_caught():
    _, second = two_pass("plain", shared_stream=True)
    assert p_value(second["emitted"][:, 0], expected(TARGET[1], "plain")) < SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(2, 2, 2), (2, 1, 0)])
def test_a_fused_pass_verifies_the_drafts_of_the_pass_before(groups):
    window = fused_window(groups)
    constants = {"draft_rows": window.draft_rows, "lookahead_ids": window.lookahead_ids(VOCAB)}
    feed = request("plain") | constants
    missing = np.full((REQUESTS, 2), VOCAB)
    roots, lookahead = np.ones((REQUESTS, 1)), np.ones((REQUESTS, sum(groups)))
    ids = np.concatenate([roots, missing, lookahead], 1).astype(np.int64)
    groups_logits = [DRAFT[i] for size in groups for i in range(size)]
    feed |= {"logits": rows(TARGET[0], TARGET[1], TARGET[2], *groups_logits), "input_ids": ids}
    first = run(window, "plain", feed | {"draft_probs": np.zeros((REQUESTS, 2, VOCAB), np.float32)})
    assert (first["count"] == 1).all(), "a missing draft is never accepted"
    assert p_value(first["emitted"][:, 0], expected(TARGET[0], "plain")) > SIGNIFICANCE
    feed["logits"] = rows(TARGET[1], TARGET[2], TARGET[2], *groups_logits)
    feed |= {"draft_probs": first["next_draft_probs"], "length": first["next_length"]}
    second = run(window, "plain", feed | {"input_ids": first["next_ids"]})
    assert p_value(second["emitted"][:, 0], expected(TARGET[1], "plain")) > SIGNIFICANCE
    accepted = second["count"] > 1
    assert p_value(second["emitted"][accepted, 1], expected(TARGET[2], "plain")) > SIGNIFICANCE
    draft_counts = np.array(groups)[second["count"] - 1]
    assert ((second["next_ids"][:, 1:3] < VOCAB).sum(1) == draft_counts).all()
    has_draft = np.arange(2) < draft_counts[:, None]
    assert np.allclose(second["next_draft_probs"].sum(-1), has_draft, atol=1e-5)
