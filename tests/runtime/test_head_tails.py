from __future__ import annotations

import numpy as np
import pytest
from aliasing import late_readers
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_oracle import NEAR_TIE, group_at, oracle_samples, plant_drafts, sampling_params
from tail_runs import HIDDEN, POSITIONS, PRUNED, WINDOWS, random_head, run_tail

from pass_exporter.tails.match import build_tail
from pass_exporter.tails.rejection import build_rejection_tail
from pass_runtime.bundle.head import has_candidate_subset
from pass_runtime.bundle.noise import noise_offsets
from pass_runtime.bundle.reference import (
    gumbel_scores,
    kept_tokens,
    log_exponentials,
    two_level_scores,
)
from pass_runtime.bundle.sampling import SAMPLERS, SamplingParams
from pass_runtime.bundle.window import Window, draft_window, fused_window
from tail_definitions import adjusted_logits

# With 1024 and 2048 tokens, some are candidates for drafts; with the other sizes, all are.
VOCABS = (24, 37, 1024, 1501, 2048)
DRAFTING_WINDOWS = [window for window in (*WINDOWS, *PRUNED) if window.next.drafts]


def next_drafts(
    window: Window, logits, hidden, out: dict, b: int, accepted: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return request b's next drafts, their positions after `length` [D], and the logits [D,V] that
    the head adjusted."""
    rows, vocab = group_at(window, accepted), logits.shape[1]
    ids = out["next_ids"][b].tolist()
    root, drafts = ids[0], ids[1 : 1 + len(rows)]
    assert ids[1 + len(rows) : 1 + window.next.drafts] == [vocab] * (window.next.drafts - len(rows))
    depth = np.array([window.rows[row].depth + 1 for row in rows], np.int64)
    if not rows:
        return [], depth, logits[:0]
    before = np.array([[root, *drafts[:-1]]])
    states = hidden[np.array(rows) - (window.width - len(window.lookahead_rows))]
    adjusted = adjusted_logits(random_head(vocab), states[None], logits[rows][None], before)
    return drafts, depth, adjusted[0]


def check_drawn(scores: np.ndarray, token: int, what: object) -> None:
    best = int(scores.argmax())
    assert token == best or abs(float(scores[best] - scores[token])) < NEAR_TIE, what


def make_batch(window: Window, vocab: int, batch: int, spread: float, rng, *, ties: bool) -> dict:
    logits = rng.normal(0, spread, (batch, window.width, vocab)).astype(np.float32)
    hidden = rng.standard_normal((batch, sum(window.groups), HIDDEN)).astype(np.float32)
    return {
        "logits": np.round(logits) if ties else logits,
        "hidden": hidden,
        "ids": rng.integers(0, vocab, (batch, window.width)),
        "length": rng.integers(0, POSITIONS - window.width - 1, batch),
    }


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_drafts_are_those_of_the_definition(sampler, vocab, data):
    window = data.draw(st.sampled_from(DRAFTING_WINDOWS))
    active = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    params = [data.draw(sampling_params(sampler)) for _ in active]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0.5, 3.0, 12.0]))
    given = make_batch(window, vocab, len(active), spread, rng, ties=data.draw(st.booleans()))
    for b, sampling in enumerate(params):
        samples = oracle_samples(window, given["logits"][b], int(given["length"][b]), sampling)
        accepted = data.draw(st.integers(0, window.drafts))
        planted = plant_drafts(samples, window.drafts, accepted, vocab, rng)
        given["ids"][b, 1 : 1 + window.drafts] = planted
    out = run_tail(window, sampler, params=params, active=active, **given)
    without = run_tail(window, sampler, params=params, active=active, **given | {"hidden": None})
    for name in ("emitted", "count", "next_length"):
        np.testing.assert_array_equal(out[name], without[name])
    assert out["next_ids"][:, 0].tolist() == without["next_ids"][:, 0].tolist()
    for b, sampling in enumerate(params):
        if active[b]:
            length, accepted = int(given["length"][b]), int(out["count"][b]) - 1
            request = given["logits"][b], given["hidden"][b], out, b, accepted
            drafts, depth, adjusted = next_drafts(window, *request)
            scores = gumbel_scores(adjusted, length + depth, sampling) if drafts else []
            for j, token in enumerate(drafts):
                assert adjusted[j, token] > -np.inf
                check_drawn(scores[j], token, (window.name, j, sampling))


@pytest.mark.parametrize("vocab", [24, 1024])
@pytest.mark.parametrize(
    "window", [draft_window(6), fused_window([6] * 7), fused_window([2, 6, 0, 5, 1, 1, 3])], ids=str
)
@pytest.mark.parametrize(
    "params", [SamplingParams(0.8, seed=5), SamplingParams(0.8, 9, seed=5)], ids=["", "top-k"]
)
def test_by_rejection_q_is_the_distribution_that_drafts_were_drawn_from(params, window, vocab):
    batch, rng = window.drafts + 1, np.random.default_rng(window.width)
    given = make_batch(window, vocab, batch, 2.0, rng, ties=False)
    # Request b has b drafts that the model accepts, and then missing ones.
    for b in range(batch):
        given["ids"][b, 1 : 1 + window.drafts] = vocab
        given["ids"][b, 1 : 1 + b] = given["logits"][b, :b].argmax(-1)
    given["draft_probs"] = np.full((batch, window.drafts, vocab), 1 / vocab, np.float32)
    out = run_tail(window, params.sampler, params=[params] * batch, rule="rejection", **given)
    assert out["count"].tolist() == list(range(1, batch + 1))
    for b in range(batch):
        length = int(given["length"][b])
        request = given["logits"][b], given["hidden"][b], out, b, b
        drafts, depth, adjusted = next_drafts(window, *request)
        q = np.zeros((window.next.drafts, vocab), np.float32)
        if drafts:
            scaled = adjusted / np.float32(params.temperature)
            scaled -= scaled.max(-1, keepdims=True)
            scaled = np.where(kept_tokens(scaled, params), scaled, np.float32(-np.inf))
            q[: len(drafts)] = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
            offsets = noise_offsets(params.seed, length + depth, "draft_offsets")
            noise = log_exponentials(offsets, vocab)
            for scores, token in zip(two_level_scores(scaled, noise), drafts, strict=True):
                check_drawn(scores, token, (window.name, b))
        np.testing.assert_allclose(out["next_draft_probs"][b], q, atol=1e-5)
        if has_candidate_subset(vocab):
            assert (out["next_draft_probs"][b] > 0).sum(-1).max() <= 512


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("window", DRAFTING_WINDOWS[:6], ids=lambda window: window.name)
@pytest.mark.parametrize("build", [build_tail, build_rejection_tail])
def test_outputs_may_lie_in_the_memory_of_the_inputs(build, window, sampler):
    if build is build_tail or sampler != "greedy":
        assert not late_readers(build(window, sampler, 1024, random_head(1024)).graph)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "window", [draft_window(2), fused_window([2, 2, 2])], ids=lambda window: window.name
)
def test_nothing_keeps_a_tail_out_of_cuda_graphs(window, sampler):
    for vocab in (1024, 1501):
        graph = build_tail(window, sampler, vocab, random_head(vocab)).graph
        operators = [node.op_type for node in graph]
        assert not {"GatherND", "ScatterND", "NonZero", "If", "Loop", "Mod"} & set(operators)
        if sampler == "greedy" and has_candidate_subset(vocab):
            assert operators.count("ArgMax") == 1 + window.next.drafts
            assert "ScatterElements" not in operators  # only candidates can be drafts


@pytest.mark.parametrize(
    ("sampler", "max_nodes", "by_draft"),
    [("greedy", 65, 15), ("sample", 130, 25), ("truncated", 175, 40)],
)
def test_a_draft_adds_few_nodes(sampler, max_nodes, by_draft):
    tails = (
        build_tail(fused_window([drafts] * (drafts + 1)), sampler, 1024, random_head(1024))
        for drafts in (1, 2, 4)
    )
    one, two, four = (len(list(tail.graph)) for tail in tails)
    assert one <= max_nodes
    assert four - two <= 2 * by_draft
