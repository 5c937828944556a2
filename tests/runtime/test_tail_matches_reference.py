from __future__ import annotations

import numpy as np
import pytest
from aliasing import late_readers
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_oracle import NEAR_TIE, group_at, oracle_samples, plant_drafts, sampling_params
from tail_runs import POSITIONS, PRUNED, WINDOWS, run_tail

from pass_exporter.tails.match import build_tail
from pass_exporter.tails.rejection import build_rejection_tail
from pass_runtime.bundle.reference import gumbel_scores
from pass_runtime.bundle.sampling import SAMPLERS, SamplingParams
from pass_runtime.bundle.window import Window, fused_window

# With and without a last partial block of noise, below and above MAX_CANDIDATES.
VOCABS = (24, 37, 1501, 2048)


def check_request(
    window: Window, out: dict, b: int, logits, ids, length: int, params: SamplingParams
) -> int:
    vocab, after = logits.shape[1], window.next
    emitted, ids_after = out["emitted"][b].tolist(), out["next_ids"][b].tolist()
    accepted = 0
    while accepted < window.drafts and emitted[accepted] == ids[accepted + 1]:
        accepted += 1
    assert out["count"][b] == accepted + 1
    assert out["next_length"][b] == length + accepted + 1
    assert ids_after[0] == emitted[accepted]
    assert ids_after[1 + after.drafts :] == [
        vocab + i for size in after.groups for i in range(size)
    ]
    # The next drafts are the samples of the group after the last accepted draft; a smaller group
    # leaves missing drafts.
    group = group_at(window, accepted)
    assert ids_after[1 + len(group) : 1 + after.drafts] == [vocab] * (after.drafts - len(group))
    drawn = dict(enumerate(emitted)) | dict(zip(group, ids_after[1:], strict=False))
    expected = oracle_samples(window, logits, length, params)
    for row, token in drawn.items():
        if token != expected[row]:
            position = np.array([length + window.rows[row].depth + 1])
            scores = gumbel_scores(logits[row][None], position, params)[0]
            margin = abs(float(scores[expected[row]] - scores[token]))
            print(f"row {row}: drew {token}, numpy {expected[row]}, margin {margin:.2g}")
            assert margin < NEAR_TIE, (window.name, row, params)
    return accepted


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=st.data())
def test_any_batch_of_requests_gets_what_numpy_gives_it(sampler, vocab, data):
    window = data.draw(st.sampled_from([*WINDOWS, *PRUNED]))
    batch = data.draw(st.integers(1, 3))
    params = [data.draw(sampling_params(sampler)) for _ in range(batch)]
    length = np.array(
        [data.draw(st.integers(0, POSITIONS - window.width - 1)) for _ in range(batch)]
    )
    planted = [data.draw(st.integers(0, window.drafts)) for _ in range(batch)]
    spread = data.draw(st.sampled_from([0.5, 3.0, 12.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, spread, (batch, window.width, vocab)).astype(np.float32)
    if data.draw(st.booleans()):
        logits = np.round(logits)  # ties everywhere, as float16 models have them
    ids = rng.integers(0, vocab, (batch, window.width))
    for b in range(batch):
        samples = oracle_samples(window, logits[b], int(length[b]), params[b])
        ids[b, 1 : 1 + window.drafts] = plant_drafts(samples, window.drafts, planted[b], vocab, rng)
    out = run_tail(window, sampler, logits, ids, length, params)
    assert out["emitted"].shape == (batch, window.max_emitted)
    for b in range(batch):
        check_request(window, out, b, logits[b], ids[b].tolist(), int(length[b]), params[b])


@pytest.mark.parametrize("wrong", [0, 24], ids=["wrong", "missing"])
def test_a_draft_behind_a_wrong_or_missing_one_is_not_accepted(wrong):
    window = fused_window([2, 1, 0])
    logits = np.zeros((1, window.width, 24), np.float32)
    logits[0, :, 5] = 9
    ids = np.array([[1, wrong, 5, 24, 25, 24]])
    out = run_tail(window, "greedy", logits, ids, np.array([10]), [SamplingParams()])
    assert (out["count"].tolist(), out["next_length"].tolist()) == ([1], [11])
    assert out["next_ids"].tolist() == [[5, 5, 5, 24, 25, 24]]


def drawn(sampler: str, logits: np.ndarray, params: list[SamplingParams]) -> list[int]:
    """Return the tokens of a plain pass after n tokens for request n. logits: [B,V]"""
    ids = np.zeros((len(params), 1), np.int64)
    logits = logits[:, None].astype(np.float32)
    out = run_tail(WINDOWS[0], sampler, logits, ids, np.arange(len(params)), params)
    return out["emitted"][:, 0].tolist()


@pytest.mark.parametrize("level", [3.0, -3.0, 0.0])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_0_is_argmax_and_the_lower_id_wins_a_tie(sampler, level):
    logits = np.full((24, 37), level - 5)
    for b in range(24):
        logits[b, [b, b + 3, b + 9]] = level
    params = [SamplingParams(0.0, seed=b) for b in range(24)]
    assert drawn(sampler, logits, params) == list(range(24))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_0_draws_the_larger_of_two_neighbouring_floats(sampler):
    """Although its token has the higher id, which loses a tie."""
    lower = np.random.default_rng(4).uniform(1, 16, 100).astype(np.float32)
    logits = np.zeros((100, 37), np.float32)
    logits[:, 5], logits[:, 9] = lower, np.nextafter(lower, np.float32(100))
    params = [SamplingParams(0.0, seed=b) for b in range(100)]
    assert drawn(sampler, logits, params) == [9] * 100


@pytest.mark.parametrize("temperature", [1e-6, 1e-25, 1e-35, 1e-40])
@pytest.mark.parametrize("sampler", ["sample", "truncated"])
def test_a_tiny_temperature_is_argmax(sampler, temperature):
    logits = np.random.default_rng(2).normal(0, 30, (20, 37)).astype(np.float32)
    top_k = 5 if sampler == "truncated" else 0
    params = [SamplingParams(temperature, top_k, seed=b) for b in range(20)]
    best = logits.argmax(-1).tolist()
    assert drawn(sampler, logits, params) == best
    assert [oracle_samples(WINDOWS[0], logits[b, None], b, params[b])[0] for b in range(20)] == best


@pytest.mark.parametrize("top_k", [1, 5, 36, 37, 38, 1024])
def test_ties_at_the_edge_of_top_k_are_all_kept(top_k):
    logits = np.zeros((400, 37))
    logits[:, 30:] = -1
    tokens = drawn("truncated", logits, [SamplingParams(1.0, top_k, seed=b) for b in range(400)])
    assert set(tokens) == set(range(30 if top_k <= 30 else 37))


@pytest.mark.parametrize("build", [build_tail, build_rejection_tail])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.name)
def test_outputs_may_lie_in_the_memory_of_the_inputs(window, sampler, build):
    graph = build(window, sampler, 24).graph
    assert "length" in [value.name for value in graph.inputs]
    assert not late_readers(graph)
