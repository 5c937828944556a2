from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from tail_runs import open_graph, run_graph

from pass_exporter.tails.outputs import build_logprobs
from pass_runtime.bundle.sampling import MAX_LOGPROBS
from tail_definitions import token_logprobs

NAMES = ("chosen_logprob", "top_ids", "top_logprobs")


@lru_cache
def session(vocab: int) -> ort.InferenceSession:
    return open_graph(build_logprobs(vocab))


def run(logits: np.ndarray, emitted: np.ndarray) -> tuple[np.ndarray, ...]:
    out = run_graph(session(logits.shape[2]), {"logits": logits, "emitted": emitted})
    return tuple(out[name] for name in NAMES)


@pytest.mark.parametrize("vocab", [12, 37, 2048])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_graph_numpy_and_scipy_agree(vocab, data):
    batch, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30))
    emits = data.draw(st.integers(1, width))
    spread = data.draw(st.sampled_from([1e-3, 1.0, 30.0]))
    # With the offset, exp of the logits would overflow.
    offset = data.draw(st.sampled_from([0.0, -200.0, 200.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    # No two logits are equal.
    logits = (rng.permuted(np.arange(batch * width * vocab)) / vocab).reshape(batch, width, vocab)
    logits = (offset + spread * logits / logits.max()).astype(np.float32)
    emitted = rng.integers(0, vocab, (batch, emits))
    chosen, ids, tops = run(logits, emitted)
    exact = log_softmax(logits[:, :emits].astype(np.float64), -1)
    expected = token_logprobs(logits, emitted, MAX_LOGPROBS)
    for got in (chosen, expected[0]):
        assert got.dtype == np.float32
        of_emitted = np.take_along_axis(exact, emitted[..., None], -1)[..., 0]
        assert np.allclose(got, of_emitted, atol=5e-5)
    for got_ids, got in ((ids, tops), expected[1:]):
        assert got_ids.shape == got.shape == (batch, emits, min(MAX_LOGPROBS, vocab))
        # Values are compared, because rounding may have made two logits equal.
        of_ids, best = np.take_along_axis(exact, got_ids, -1), -np.sort(-exact)[..., :MAX_LOGPROBS]
        assert np.allclose(of_ids, best, atol=5e-5)
        assert np.allclose(got, of_ids, atol=5e-5)
        assert (np.sort(got_ids, -1)[..., 1:] != np.sort(got_ids, -1)[..., :-1]).all()


def test_missing_drafts_change_no_other_entry():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 3, (1, 3, 37)).astype(np.float32)
    chosen, beside = (run(logits, np.array([[4, 9, last]]))[0] for last in (5, 37))
    assert np.array_equal(chosen[:, :2], beside[:, :2])
    assert np.isfinite(beside).all()
