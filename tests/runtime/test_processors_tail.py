from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tail_runs import open_graph, run_graph

from pass_exporter.bundle import write_graph
from pass_exporter.tails.outputs import build_processors
from tail_definitions import process_logits


@lru_cache
def processors_session(vocab: int) -> ort.InferenceSession:
    return open_graph(build_processors(vocab))


@pytest.mark.parametrize("vocab", [12, 37, 2048])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(data=st.data())
def test_graph_and_numpy_agree_to_the_last_bit(vocab: int, data: st.DataObject):
    batch, width = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    rows, size = data.draw(st.integers(1, width)), data.draw(st.integers(1, 16))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.normal(0, 10, (batch, width, vocab)).astype(np.float32)
    allowed = rng.random((batch, rows, vocab)) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    packed = np.packbits(allowed, axis=-1, bitorder="little").astype(np.int32)
    used = data.draw(st.integers(1, min(size, vocab)))  # of the `size` entries of a list
    touched = rng.integers(0, vocab, (batch, size))
    if size <= vocab:
        touched = np.stack([rng.permutation(vocab)[:size] for _ in range(batch)])
    bias = rng.normal(0, 5, (batch, size)).astype(np.float32)
    factor = rng.choice([0.5, 1.0, 1.7], (batch, rows, size)).astype(np.float32)
    penalty = rng.choice([-1.0, 0.0, 2.5], (batch, rows, size)).astype(np.float32)
    # Unused entries of a list repeat its first entry.
    for values in (touched, bias, factor, penalty):
        values[..., used:] = values[..., :1]
    feeds = {"logits": logits, "allowed": packed, "touched": touched, "bias": bias}
    feeds |= {"factor": factor, "penalty": penalty}
    out = run_graph(processors_session(vocab), feeds)["processed_logits"]
    expected = process_logits(logits, allowed, touched, bias, factor, penalty)
    assert out.dtype == np.float32
    assert np.array_equal(out, expected)
    assert np.array_equal(out[:, rows:], logits[:, rows:])
    assert (out[:, :rows][~allowed] < -1e29).all()


def test_the_graph_of_processors_is_small(tmp_path: Path):
    graph = write_graph(build_processors(49152), tmp_path / "tail.processors.onnx")
    assert (tmp_path / graph.file).stat().st_size < 20_000
