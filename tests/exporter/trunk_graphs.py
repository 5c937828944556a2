"""For tests of quantized and derived trunks: counts the operators of a graph, and runs a trunk."""

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
"""The number of cache entries before the window, for each of two slots."""
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
    """Return the logits of all rows and the cache, for tokens and cache entries
    that are the same in every call.

    exact: whether activations are not rounded to 8 bits. Rounding can make a difference of 1e-7
    between two trunks one of 1e-4.
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
    """Assert that the root's logits have the same bits in every plan, batch and capacity."""
    expected = run_trunk(bundle, "trunk.cpu.onnx", make_cycle("ar", 0).plans[0])[0][0, 0]
    for plan in (*make_cycle("fused", 2).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)):
        for batch in (1, 2):
            for capacity in (64, 128, 320):
                logits = run_trunk(bundle, "trunk.cpu.onnx", plan, batch, capacity)[0]
                assert np.array_equal(logits[0, 0], expected), (plan.name, batch, capacity)
