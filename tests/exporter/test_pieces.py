"""`run_in_pieces` runs a graph in pieces, so that ONNX Runtime copies few weights at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from pass_exporter.checks import trunks
from pass_exporter.checks.trunks import run_in_pieces
from pass_exporter.tails.tape import GraphTape
from pass_runtime.backends.ort.session import open_session
from pass_runtime.bundle.open_files import OpenFiles
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.window import fused_window
from trunk_feeds import trunk_feed


@pytest.mark.parametrize("size", [1, 20_000, 1 << 30])
@pytest.mark.parametrize("file", ["trunk.onnx", "trunk.cpu.onnx"])
def test_a_trunk_in_pieces_computes_the_same_bits(adapter_bundle, monkeypatch, file, size):
    monkeypatch.setattr(trunks, "MAX_PIECE_ELEMENTS", size)
    model, rng = read_manifest(adapter_bundle).model, np.random.default_rng(0)
    session = open_session(adapter_bundle / file, "cpu", exact=True)
    feeds, shape = [], (1, model.kv_heads, 32, model.head_dim)
    for window in (fused_window([2, 2, 1]), fused_window([1, 1])):
        tokens = rng.integers(0, model.vocab_size, (1, window.width))
        past = [rng.standard_normal(shape, np.float32) for _ in range(2 * model.layers)]
        feeds.append(trunk_feed(session, window, tokens, [5], past))
    results = run_in_pieces(adapter_bundle / file, feeds)
    for feed, outputs in zip(feeds, results, strict=True):
        for expected, output in zip(session.run(None, feed), outputs.values(), strict=True):
            np.testing.assert_array_equal(output, expected)


def test_weights_are_dequantized_once_for_all_feeds(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    codes, x = rng.integers(-128, 128, (2, 4, 4), np.int8), rng.standard_normal((3, 2, 4), "f4")
    op = GraphTape("products")
    result, scale = op.input("x", np.float32, [2, 4]), op.const(0.5, np.float32)
    for each in codes:
        result = op("MatMul", result, op("DequantizeLinear", op.const(each, np.int8), scale))
    ir.save(op.model({"y": (result, np.float32, [2, 4])}), tmp_path / "products.onnx")
    ran: list[str] = []  # the operators of each run

    def open_recorded(file: Path, device: str, *, exact: bool, files: OpenFiles) -> Any:
        graph = onnx.load_model_from_string(files.graphs[file.name]).graph
        operators = [node.op_type for node in graph.node]
        session = open_session(file, device, exact=exact, files=files)
        run = Mock(side_effect=lambda *given: ran.extend(operators) or session.run(*given))
        return Mock(get_inputs=session.get_inputs, get_outputs=session.get_outputs, run=run)

    monkeypatch.setattr(trunks, "open_session", open_recorded)
    for size in (1, 1000):
        monkeypatch.setattr(trunks, "MAX_PIECE_ELEMENTS", size)
        ran.clear()
        results = run_in_pieces(tmp_path / "products.onnx", [{"x": each} for each in x])
        first, last = codes.astype(np.float32) / 2
        for each, outputs in zip(x, results, strict=True):
            np.testing.assert_allclose(outputs["y"], each @ first @ last, rtol=1e-4)
        assert Counter(ran) == {"DequantizeLinear": len(codes), "MatMul": 2 * len(x)}
