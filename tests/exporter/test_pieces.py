"""A graph in pieces is the whole graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pass_exporter.checks import pieces
from pass_exporter.checks.pieces import run_in_pieces
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.plan import fused_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import PAST, ROWS_INPUT, cache_names


@pytest.mark.parametrize("size", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("file", ["trunk.onnx", "trunk.cpu.onnx", "trunk.cpu.one.onnx"])
def test_a_trunk_in_pieces(adapter_bundle: Path, monkeypatch: pytest.MonkeyPatch, file: str, size: int):
    monkeypatch.setattr(pieces, "PIECE", size)
    model, rng = read_manifest(adapter_bundle).model, np.random.default_rng(0)
    feeds = []
    for plan in (fused_plan([2, 2, 1]), fused_plan([1, 1])):
        feed = {
            "input_ids": rng.integers(0, model.vocab_size, (1, plan.width)),
            "row_position": plan.row_position,
            "window_mask": plan.window_mask,
            "length": np.array([5]),
            "logit_rows": np.arange(plan.width),
            ROWS_INPUT: plan.lookahead_rows,
        }
        shape = (1, model.kv_heads, 32, model.head_dim)
        feeds.append(feed | {n: rng.standard_normal(shape, np.float32) for n in cache_names(PAST, model.layers)})
    before = set(adapter_bundle.iterdir())
    found = run_in_pieces(adapter_bundle / file, feeds)
    assert set(adapter_bundle.iterdir()) == before
    session = open_session(adapter_bundle / file, "cpu", exact=True)
    for feed, outputs in zip(feeds, found, strict=True):
        for whole, part in zip(session.run(None, feed), outputs, strict=True):
            np.testing.assert_array_equal(part, whole)
