"""Operators of a graph, and runs of a trunk, for tests of quantized and derived trunks."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest
from trunk_feeds import trunk_feed

LENGTHS = (9, 30)
"""The cache entries before the window, of each slot."""
opened = cache(open_session)


def load_graph(file: Path) -> onnx.GraphProto:
    return onnx.load(file, load_external_data=False).graph


def count(graph: onnx.GraphProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in graph.node)


def optimized_graph(file: Path, directory: Path) -> onnx.GraphProto:
    """Return the graph that ONNX Runtime runs on the CPU."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return load_graph(directory / "optimized.onnx")


def run_trunk(
    bundle: Path, file: str, plan: Plan, batch: int = 1, capacity: int = 64, *, exact: bool = False
) -> list[np.ndarray]:
    """Return the logits of all rows and the cache, for tokens and entries that are always the same.

    exact: without rounding activations to 8 bits, which makes a difference of 1e-7 one of 1e-4.
    """
    model, rng = read_manifest(bundle).model, np.random.default_rng(0)
    session = opened(bundle / file, "cpu", exact=exact)
    tokens = rng.integers(0, model.vocab_size, (len(LENGTHS), 64))[:batch]
    past = []
    for _ in range(2 * model.layers):
        entries = rng.standard_normal((len(LENGTHS), model.kv_heads, 40, model.head_dim))
        past.append(np.zeros((batch, model.kv_heads, capacity, model.head_dim), model.dtype))
        past[-1][:, :, :40] = entries[:batch]
    return session.run(None, trunk_feed(session, plan, tokens, LENGTHS[:batch], past))


def check_widths(bundle: Path) -> None:
    """Assert that the root has the same bits in windows of every plan, batch and capacity."""
    alone = run_trunk(bundle, "trunk.cpu.onnx", make_cycle("ar", 0).plans[0])[0][0, 0]
    for plan in (*make_cycle("fused", 2).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)):
        for batch in (1, 2):
            for capacity in (64, 128, 320):
                logits = run_trunk(bundle, "trunk.cpu.onnx", plan, batch, capacity)[0]
                assert np.array_equal(logits[0, 0], alone), (plan.name, batch, capacity)
