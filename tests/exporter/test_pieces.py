"""A graph that is run in pieces computes the same bits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx_ir as ir
import pytest

from pass_exporter.checks import pieces
from pass_exporter.checks.pieces import run_in_pieces
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.plan import fused_plan
from pass_runtime.bundle.read import read_manifest
from trunk_feeds import trunk_feed


@pytest.mark.parametrize("size", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("file", ["trunk.onnx", "trunk.cpu.onnx", "trunk.cpu.one.onnx"])
def test_a_trunk_in_pieces(
    adapter_bundle: Path, monkeypatch: pytest.MonkeyPatch, file: str, size: int
):
    monkeypatch.setattr(pieces, "MAX_PIECE_ELEMENTS", size)
    model, rng = read_manifest(adapter_bundle).model, np.random.default_rng(0)
    session = open_session(adapter_bundle / file, "cpu", exact=True)
    feeds, shape = [], (1, model.kv_heads, 32, model.head_dim)
    for plan in (fused_plan([2, 2, 1]), fused_plan([1, 1])):
        tokens = rng.integers(0, model.vocab_size, (1, plan.width))
        past = [rng.standard_normal(shape, np.float32) for _ in range(2 * model.layers)]
        feeds.append(trunk_feed(session, plan, tokens, [5], past))
    before = set(adapter_bundle.iterdir())
    found = run_in_pieces(adapter_bundle / file, feeds)
    assert set(adapter_bundle.iterdir()) == before
    for feed, outputs in zip(feeds, found, strict=True):
        for whole, part in zip(session.run(None, feed), outputs.values(), strict=True):
            np.testing.assert_array_equal(part, whole)


def test_weights_are_restored_once_for_all_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise this takes most of the time of a check."""
    rng = np.random.default_rng(0)
    codes, x = rng.integers(-128, 128, (2, 4, 4), np.int8), rng.standard_normal((3, 2, 4), "f4")
    rows = ir.Value(name="x", shape=ir.Shape([2, 4]), type=ir.TensorType(ir.DataType.FLOAT))
    scale = ir.Value(name="scale", const_value=ir.tensor(np.float32(0.5), name="scale"))
    weights = [
        ir.Value(name=f"w{i}", const_value=ir.tensor(each, name=f"w{i}"))
        for i, each in enumerate(codes)
    ]
    nodes, result = [], rows
    for weight in weights:
        nodes.append(ir.node("DequantizeLinear", [weight, scale]))
        nodes.append(ir.node("MatMul", [result, nodes[-1].outputs[0]]))
        result = nodes[-1].outputs[0]
    result.name, result.type = "y", rows.type
    graph = ir.Graph(
        [rows], [result], nodes=nodes, initializers=[scale, *weights], opset_imports={"": 24}
    )
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "products.onnx")
    ran: list[str] = []

    def watched(file: Path, device: str, *, exact: bool) -> Any:
        operators = [node.op_type for node in ir.load(file).graph]
        session = open_session(file, device, exact=exact)
        run = Mock(side_effect=lambda *given: ran.extend(operators) or session.run(*given))
        return Mock(get_inputs=session.get_inputs, get_outputs=session.get_outputs, run=run)

    monkeypatch.setattr(pieces, "open_session", watched)
    for size in (1, 1000):
        monkeypatch.setattr(pieces, "MAX_PIECE_ELEMENTS", size)
        ran.clear()
        found = run_in_pieces(tmp_path / "products.onnx", [{"x": each} for each in x])
        first, last = codes.astype(np.float32) / 2
        assert all(
            np.allclose(y["y"], each @ first @ last, rtol=1e-4)
            for y, each in zip(found, x, strict=True)
        )
        assert Counter(ran) == {"DequantizeLinear": len(codes), "MatMul": 2 * len(x)}
