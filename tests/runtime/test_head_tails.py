"""Tails with a draft head choose the drafts that their definition in numpy does
(`pass_exporter.tails.definitions`). For each draft, the definition is given the drafts that the
graph chose before it.

Where the graph draws another token than numpy does, the scores of the two must be a near-tie, which
rounding in float32 may decide either way.
"""

from __future__ import annotations

import numpy as np
import pytest
from aliasing import late_readers
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_oracle import NEAR_TIE, group_at, oracle_samples, plant_drafts, sampling_params
from tail_runs import HIDDEN, PLANS, POSITIONS, PRUNED, random_head, run_tail

from pass_exporter.tails.definitions import adjusted_logits
from pass_exporter.tails.match import build_tail
from pass_exporter.tails.rejection import build_rejection_tail
from pass_runtime.bundle.head import has_candidate_subset
from pass_runtime.bundle.noise import noise_offsets
from pass_runtime.bundle.plan import Plan, draft_plan, fused_plan
from pass_runtime.bundle.reference import (
    gumbel_scores,
    kept_tokens,
    log_exponentials,
    two_level_scores,
)
from pass_runtime.bundle.sampling import SAMPLERS, SamplingParams

# With 1024 and 2048 tokens, some are candidates for drafts; with the other sizes, all are.
VOCABS = (24, 37, 1024, 1501, 2048)
DRAFTING_PLANS = [plan for plan in (*PLANS, *PRUNED) if plan.next.drafts]


def next_drafts(
    plan: Plan, logits, hidden, out: dict, b: int, accepted: int
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Return the next drafts of request b, their positions after `length` [D], and the logits [D,V]
    that the draft head adjusted. logits [Q,V] and hidden are those of the request."""
    rows, vocab = group_at(plan, accepted), logits.shape[1]
    window = out["next_ids"][b].tolist()
    root, drafts = window[0], window[1 : 1 + len(rows)]
    assert window[1 + len(rows) : 1 + plan.next.drafts] == [vocab] * (plan.next.drafts - len(rows))
    depth = np.array([plan.rows[row].depth + 1 for row in rows], np.int64)
    if not rows:
        return [], depth, logits[:0]
    before = np.array([[root, *drafts[:-1]]])
    states = hidden[np.array(rows) - (plan.width - len(plan.lookahead_rows))]
    adjusted = adjusted_logits(random_head(vocab), states[None], logits[rows][None], before)
    return drafts, depth, adjusted[0]


def check_drawn(scores: np.ndarray, token: int, what: object) -> None:
    """Check that the token has the best score, but for a near-tie. what: a message."""
    best = int(scores.argmax())
    assert token == best or abs(float(scores[best] - scores[token])) < NEAR_TIE, what


def make_batch(plan: Plan, vocab: int, batch: int, spread: float, rng, *, ties: bool) -> dict:
    logits = rng.normal(0, spread, (batch, plan.width, vocab)).astype(np.float32)
    hidden = rng.standard_normal((batch, sum(plan.groups), HIDDEN)).astype(np.float32)
    return {
        "logits": np.round(logits) if ties else logits,
        "hidden": hidden,
        "ids": rng.integers(0, vocab, (batch, plan.width)),
        "length": rng.integers(0, POSITIONS - plan.width - 1, batch),
    }


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(derandomize=True, deadline=None, max_examples=40)
@given(data=st.data())
def test_drafts_are_those_of_the_definition(sampler, vocab, data):
    """For any request in any batch, masked or not; all other outputs are as without a head."""
    plan = data.draw(st.sampled_from(DRAFTING_PLANS))
    active = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=3))
    params = [data.draw(sampling_params(sampler)) for _ in active]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spread = data.draw(st.sampled_from([0.5, 3.0, 12.0]))
    given = make_batch(plan, vocab, len(active), spread, rng, ties=data.draw(st.booleans()))
    for b, sampling in enumerate(params):
        samples = oracle_samples(plan, given["logits"][b], int(given["length"][b]), sampling)
        accepted = data.draw(st.integers(0, plan.drafts))
        planted = plant_drafts(samples, plan.drafts, accepted, vocab, rng)
        given["ids"][b, 1 : 1 + plan.drafts] = planted
    out = run_tail(plan, sampler, params=params, active=active, **given)
    without = run_tail(plan, sampler, params=params, active=active, **given | {"hidden": None})
    for name in ("emitted", "count", "next_length"):
        np.testing.assert_array_equal(out[name], without[name])
    assert out["next_ids"][:, 0].tolist() == without["next_ids"][:, 0].tolist()
    for b, sampling in enumerate(params):
        if active[b]:
            length, accepted = int(given["length"][b]), int(out["count"][b]) - 1
            request = given["logits"][b], given["hidden"][b], out, b, accepted
            drafts, depth, adjusted = next_drafts(plan, *request)
            scores = gumbel_scores(adjusted, length + depth, sampling) if drafts else []
            for j, token in enumerate(drafts):
                assert adjusted[j, token] > -np.inf
                check_drawn(scores[j], token, (plan.name, j, sampling))


@pytest.mark.parametrize("vocab", [24, 1024])
@pytest.mark.parametrize(
    "plan", [draft_plan(6), fused_plan([6] * 7), fused_plan([2, 6, 0, 5, 1, 1, 3])], ids=str
)
@pytest.mark.parametrize(
    "params", [SamplingParams(0.8, seed=5), SamplingParams(0.8, 9, seed=5)], ids=["", "top-k"]
)
def test_by_rejection_q_is_the_distribution_that_drafts_were_drawn_from(params, plan, vocab):
    batch, rng = plan.drafts + 1, np.random.default_rng(plan.width)
    given = make_batch(plan, vocab, batch, 2.0, rng, ties=False)
    # Request b has b drafts that the model accepts, and then missing ones.
    for b in range(batch):
        given["ids"][b, 1 : 1 + plan.drafts] = vocab
        given["ids"][b, 1 : 1 + b] = given["logits"][b, :b].argmax(-1)
    given["draft_probs"] = np.full((batch, plan.drafts, vocab), 1 / vocab, np.float32)
    out = run_tail(plan, params.sampler, params=[params] * batch, rule="rejection", **given)
    assert out["count"].tolist() == list(range(1, batch + 1))
    for b in range(batch):
        length = int(given["length"][b])
        request = given["logits"][b], given["hidden"][b], out, b, b
        drafts, depth, adjusted = next_drafts(plan, *request)
        q = np.zeros((plan.next.drafts, vocab), np.float32)
        if drafts:
            scaled = adjusted / np.float32(params.temperature)
            scaled -= scaled.max(-1, keepdims=True)
            scaled = np.where(kept_tokens(scaled, params), scaled, np.float32(-np.inf))
            q[: len(drafts)] = np.exp(scaled) / np.exp(scaled).sum(-1, keepdims=True)
            offsets = noise_offsets(params.seed, length + depth, "draft_offsets")
            noise = log_exponentials(offsets, vocab)
            for scores, token in zip(two_level_scores(scaled, noise), drafts, strict=True):
                check_drawn(scores, token, (plan.name, b))
        np.testing.assert_allclose(out["next_draft_probs"][b], q, atol=1e-5)
        if has_candidate_subset(vocab):
            assert (out["next_draft_probs"][b] > 0).sum(-1).max() <= 512


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_every_draft_follows_the_one_before(sampler, vocab):
    """Requests that differ in the root alone get different drafts at every position."""
    plan, rng = draft_plan(3), np.random.default_rng(1)
    given = make_batch(plan, vocab, 1, 0.5, rng, ties=False)
    given = {name: np.repeat(value, 16, 0) for name, value in given.items()}
    given["logits"][np.arange(16), 0, np.arange(16)] = 60  # the new root of request i is token i
    top = {"top_k": 20} if sampler == "truncated" else {}
    params = SamplingParams(0.0 if sampler == "greedy" else 0.1, seed=3, **top)
    windows = run_tail(plan, sampler, params=[params] * 16, **given)["next_ids"]
    assert windows[:, 0].tolist() == list(range(16))
    assert all(len(set(windows[:, 1 + j].tolist())) > 1 for j in range(3))
    without = run_tail(plan, sampler, params=[params] * 16, **given | {"hidden": None})["next_ids"]
    assert all(len(set(without[:, 1 + j].tolist())) == 1 for j in range(3))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("plan", DRAFTING_PLANS[:6], ids=lambda plan: plan.name)
@pytest.mark.parametrize("build", [build_tail, build_rejection_tail])
def test_outputs_may_lie_in_the_memory_of_the_inputs(build, plan, sampler):
    if build is build_tail or sampler != "greedy":
        assert not late_readers(build(plan, sampler, 1024, random_head(1024)).graph)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("plan", [draft_plan(2), fused_plan([2, 2, 2])], ids=lambda plan: plan.name)
def test_nothing_keeps_a_tail_out_of_cuda_graphs(plan, sampler):
    for vocab in (1024, 1501):
        graph = build_tail(plan, sampler, vocab, random_head(vocab)).graph
        operators = [node.op_type for node in graph]
        assert not {"GatherND", "ScatterND", "NonZero", "If", "Loop", "Mod"} & set(operators)
        if sampler == "greedy" and has_candidate_subset(vocab):
            assert operators.count("ArgMax") == 1 + plan.next.drafts
            assert "ScatterElements" not in operators  # only candidates can be drafts


@pytest.mark.parametrize(
    ("sampler", "max_nodes", "by_draft"),
    [("greedy", 65, 15), ("sample", 130, 25), ("truncated", 175, 40)],
)
def test_a_draft_adds_few_nodes(sampler, max_nodes, by_draft):
    """Noise and request values are computed once for all drafts: each node is a GPU launch."""
    tails = (
        build_tail(fused_plan([drafts] * (drafts + 1)), sampler, 1024, random_head(1024))
        for drafts in (1, 2, 4)
    )
    one, two, four = (len(list(tail.graph)) for tail in tails)
    assert one <= max_nodes
    assert four - two <= 2 * by_draft
