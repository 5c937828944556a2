"""The tail graphs, compared with numpy's sampler row by row, and with acceptance in a plain loop.

Where the graph draws another token than numpy does, the two must be a near-tie of float32 rounding.
"""

from __future__ import annotations

import numpy as np
import pytest
from aliasing import late_readers
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_oracle import NEAR_TIE, group_at, oracle_samples, plant_drafts, sampling_params
from tail_runs import PLANS, POSITIONS, PRUNED, run_tail

from pass_exporter.tails.match import build_tail
from pass_runtime.bundle.plan import Plan, fused_plan
from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.bundle.sampling import SAMPLERS, SamplingParams

# With and without a last partial block of noise, below and above MAX_CANDIDATES.
VOCABS = (24, 37, 1501, 2048)


def check_request(
    plan: Plan, out: dict, b: int, logits, ids, length: int, params: SamplingParams
) -> int:
    """Compare request `b` of a batch with the oracle. Return how many drafts were accepted."""
    vocab, after = logits.shape[1], plan.next
    emitted, window = out["emitted"][b].tolist(), out["next_ids"][b].tolist()
    accepted = 0
    while accepted < plan.drafts and emitted[accepted] == ids[accepted + 1]:
        accepted += 1
    assert out["count"][b] == accepted + 1
    assert out["next_length"][b] == length + accepted + 1
    assert window[0] == emitted[accepted]
    assert window[1 + after.drafts :] == [vocab + i for size in after.groups for i in range(size)]
    # The next drafts are the samples of the group after the last accepted draft; a smaller group
    # leaves missing drafts.
    group = group_at(plan, accepted)
    assert window[1 + len(group) : 1 + after.drafts] == [vocab] * (after.drafts - len(group))
    drawn = dict(enumerate(emitted)) | dict(zip(group, window[1:], strict=False))
    expected = oracle_samples(plan, logits, length, params)
    for row, token in drawn.items():
        if token != expected[row]:
            position = np.array([length + plan.rows[row].depth + 1])
            scores = gumbel_scores(logits[row][None], position, params)[0]
            margin = abs(float(scores[expected[row]] - scores[token]))
            print(f"row {row}: drew {token}, numpy {expected[row]}, margin {margin:.2g}")
            assert margin < NEAR_TIE, (plan.name, row, params)
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=st.data())
def test_any_batch_of_requests_gets_what_numpy_gives_it(sampler, vocab, data):
    plan = data.draw(st.sampled_from([*PLANS, *PRUNED]))
    batch = data.draw(st.integers(1, 3))
    params = [data.draw(sampling_params(sampler)) for _ in range(batch)]
    length = np.array([data.draw(st.integers(0, POSITIONS - plan.width - 1)) for _ in range(batch)])
    planted = [data.draw(st.integers(0, plan.drafts)) for _ in range(batch)]
    spread = data.draw(st.sampled_from([0.5, 3.0, 12.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, spread, (batch, plan.width, vocab)).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties everywhere, as float16 models have them
    ids = rng.integers(0, vocab, (batch, plan.width))
    for b in range(batch):
        samples = oracle_samples(plan, logits[b], int(length[b]), params[b])
        ids[b, 1 : 1 + plan.drafts] = plant_drafts(samples, plan.drafts, planted[b], vocab, rng)
    out = run_tail(plan, sampler, logits, ids, length, params)
    assert out["emitted"].shape == (batch, plan.max_emitted)
    for b in range(batch):
        check_request(plan, out, b, logits[b], ids[b].tolist(), int(length[b]), params[b])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "plan", [plan for plan in (*PLANS, *PRUNED) if plan.drafts], ids=lambda plan: plan.name
)
def test_requests_of_a_batch_accept_different_numbers_of_drafts(plan, sampler):
    """Of the plan's D drafts, the first request accepts none, the next one, ... the last D."""
    batch, vocab = plan.drafts + 1, 37
    rng = np.random.default_rng(plan.width)
    logits = rng.normal(0, 2, (batch, plan.width, vocab)).astype(np.float32)
    length = rng.integers(0, 500, batch)
    top = {"top_k": 20, "top_p": 0.9, "min_p": 0.05} if sampler == "truncated" else {}
    temperatures = [0.0 if sampler == "greedy" else 0.7 + b / 10 for b in range(batch)]
    params = [SamplingParams(t, seed=b, **top) for b, t in enumerate(temperatures)]
    ids = np.zeros((batch, plan.width), np.int64)
    for b in range(batch):
        samples = oracle_samples(plan, logits[b], int(length[b]), params[b])
        ids[b, 1 : 1 + plan.drafts] = plant_drafts(samples, plan.drafts, b, vocab, rng)
    out = run_tail(plan, sampler, logits, ids, length, params)
    accepted = [
        check_request(plan, out, b, logits[b], ids[b].tolist(), int(length[b]), params[b])
        for b in range(batch)
    ]
    assert accepted == list(range(batch))


@pytest.mark.parametrize("wrong", [0, 24], ids=["wrong", "missing"])
def test_a_draft_behind_a_wrong_or_missing_one_is_not_accepted(wrong):
    """Although it is right itself. A missing draft has the id V, which no sample has."""
    plan = fused_plan([2, 1, 0])
    logits = np.zeros((1, plan.width, 24), np.float32)
    logits[0, :, 5] = 9
    ids = np.array([[1, wrong, 5, 24, 25, 24]])
    out = run_tail(plan, "greedy", logits, ids, np.array([10]), [SamplingParams()])
    assert (out["count"].tolist(), out["next_length"].tolist()) == ([1], [11])
    assert out["next_ids"].tolist() == [[5, 5, 5, 24, 25, 24]]


@pytest.mark.parametrize("level", [3.0, -3.0, 0.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_0_is_argmax_and_the_lower_id_wins_a_tie(sampler, level):
    """Also in a sampling tail, which serves greedy requests of a batch."""
    logits = np.full((24, 1, 37), level - 5, np.float32)
    for b in range(24):
        logits[b, 0, [b, b + 3, b + 9]] = level
    params = [SamplingParams(0.0, seed=b) for b in range(24)]
    out = run_tail(PLANS[0], sampler, logits, np.zeros((24, 1), np.int64), np.arange(24), params)
    assert out["emitted"][:, 0].tolist() == list(range(24))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_0_draws_the_larger_of_two_neighbouring_floats(sampler):
    """Although its token has the higher id, which loses a tie."""
    lower = np.random.default_rng(4).uniform(1, 16, 100).astype(np.float32)
    logits = np.zeros((100, 1, 37), np.float32)
    logits[:, 0, 5], logits[:, 0, 9] = lower, np.nextafter(lower, np.float32(100))
    params = [SamplingParams(0.0, seed=b) for b in range(100)]
    out = run_tail(PLANS[0], sampler, logits, np.zeros((100, 1), np.int64), np.arange(100), params)
    assert (out["emitted"] == 9).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-25, 1e-35, 1e-40])
@pytest.mark.parametrize("sampler", ["sample", "truncated"])
def test_a_tiny_temperature_is_argmax(sampler, temperature):
    """In numpy and in the graph, although logits / temperature may overflow."""
    logits = np.random.default_rng(2).normal(0, 30, (20, 1, 37)).astype(np.float32)
    top_k = 5 if sampler == "truncated" else 0
    params = [SamplingParams(temperature, top_k, seed=b) for b in range(20)]
    out = run_tail(PLANS[0], sampler, logits, np.zeros((20, 1), np.int64), np.arange(20), params)
    best = logits[:, 0].argmax(-1).tolist()
    assert out["emitted"][:, 0].tolist() == best
    assert [oracle_samples(PLANS[0], logits[b], b, params[b])[0] for b in range(20)] == best


@pytest.mark.parametrize("top_k", [1, 5, 36, 37, 38, 1024])
def test_ties_at_the_edge_of_top_k_are_all_kept(top_k):
    """As in transformers; less likely tokens are removed."""
    logits = np.zeros((400, 1, 37), np.float32)
    logits[:, 0, 30:] = -1
    params = [SamplingParams(1.0, top_k, seed=b) for b in range(400)]
    out = run_tail(
        PLANS[0], "truncated", logits, np.zeros((400, 1), np.int64), np.zeros(400, np.int64), params
    )
    assert set(out["emitted"][:, 0].tolist()) == set(range(30 if top_k <= 30 else 37))


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_request_without_truncation_gets_the_same_tokens_from_the_truncated_tail(vocab):
    logits = np.random.default_rng(0).normal(0, 2, (300, 1, vocab)).astype(np.float32)
    params = [SamplingParams(0.9, seed=b) for b in range(300)]
    outs = [
        run_tail(PLANS[0], sampler, logits, np.zeros((300, 1), np.int64), np.arange(300), params)
        for sampler in ("sample", "truncated")
    ]
    assert outs[0]["emitted"].tolist() == outs[1]["emitted"].tolist()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_outputs_may_lie_in_the_memory_of_the_inputs(plan, sampler):
    """Readers of `input_ids` and `length` run before `next_ids` and `next_length` replace them."""
    graph = build_tail(plan, sampler, 24).graph
    assert "length" in [value.name for value in graph.inputs]
    assert not late_readers(graph)
