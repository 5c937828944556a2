"""Derives a trunk for ONNX Runtime's CUDA provider in which each layer's attention is one GroupQueryAttention.

If query heads share K and V, `Attention` with a mask first expands K and V to all query heads, in every layer and pass
(fp16: `LaunchUngroup` before the memory-efficient kernel). GroupQueryAttention reads the cache directly, but its
kernels with `attention_bias` are not fused (onnxruntime-gpu 1.31.1). Which one is faster has not been measured
on a GPU, so an export writes this trunk only on request.

The operator reads `total_sequence_length` on the host, so in a pass that is captured as a CUDA graph it cannot be the
length of the text. It is the capacity, which is a shape; `seqlens_k`, on the device, gives the number of valid
entries minus one. The operator has kernels for 16-bit dtypes only, and does not accept batches of windows with several
rows, so this trunk is for one sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.group_query import (
    DOMAIN,
    Layer,
    UnsupportedAttention,
    qkv_rows,
    read_layer,
    replace_value,
    rotation_tables,
)
from pass_exporter.derived.heads import norm_before_transpose
from pass_exporter.trunk.graph import initializer
from pass_runtime.bundle.manifest import DerivedTrunk
from pass_runtime.errors import PassError

CUDA_TRUNK_FILE = "trunk.cuda.one.onnx"


def write_trunk_for_cuda(trunk: Path, max_capacity: int) -> tuple[DerivedTrunk, ...]:
    """Writes the graph beside `trunk`, the portable one. They share the weights file.

    Raises PassError if the operator cannot compute the model's attention.
    """
    model = ir.load(trunk)
    norm_before_transpose(model.graph)
    try:
        _replace_attention(model, max_capacity)
    except UnsupportedAttention:
        reason = "cannot compute this model's attention; leave the option out"
        raise PassError(f"--cuda-attention group-query {reason}") from None
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, trunk.with_name(CUDA_TRUNK_FILE))
    return (DerivedTrunk(file=CUDA_TRUNK_FILE, device="cuda", batch=1),)


def _replace_attention(model: ir.Model, max_capacity: int) -> None:
    graph = model.graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    layers = [read_layer(node, None) for node in attentions]
    inputs = {str(value.name): value for value in graph.inputs}
    nodes: list[ir.Node] = []

    def constant(name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        return initializer(graph, f"group_query.{name}", np.array(value, dtype))

    def add(op: str, *values: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    length, row_position, one = inputs["length"], inputs["row_position"], constant("one", [1])
    # The number of rows must be a tensor on the device. Shape would put it on the host, so it is a sum of ones.
    rows = add("ReduceSum", add("Expand", one, add("Shape", row_position)), keepdims=1)
    seqlens_k = add("Cast", add("Sub", add("Add", length, rows), one), to=int(ir.DataType.INT32))
    capacity = add("Cast", add("Shape", layers[0].past[0], start=2, end=3), to=int(ir.DataType.INT32))
    positions = add("Add", add("Unsqueeze", length, one), row_position)  # [B,Q]
    graph.insert_before(graph[0], nodes)
    pairs = dict.fromkeys(layer.cos_sin for layer in layers)
    tables = {pair: rotation_tables(model, pair, i, max_capacity) for i, pair in enumerate(pairs)}
    biases: dict[ir.Value, ir.Value] = {}
    for layer in layers:
        bias = _bias(graph, layer, biases)
        _replace(graph, layer, [seqlens_k, capacity, *tables[layer.cos_sin], positions, bias])
    graph.opset_imports[DOMAIN] = 1


def _bias(graph: ir.Graph, layer: Layer, known: dict[ir.Value, ir.Value]) -> ir.Value:
    """The mask [B,1,Q,S] of a layer as floats to be added to the scores. Layers with the same mask share it."""
    mask, dtype = layer.attention.inputs[3], layer.past[0].dtype
    assert mask is not None and dtype is not None
    if mask not in known:
        seen, unseen = np.zeros((), dtype.numpy()), np.array(np.finfo(dtype.numpy()).min, dtype.numpy())
        values = [initializer(graph, f"group_query.{name}", n) for name, n in (("seen", seen), ("unseen", unseen))]
        node = ir.node("Where", [mask, *values])
        graph.insert_before(layer.attention, node)
        known[mask] = node.outputs[0]
    return known[mask]


def _replace(graph: ir.Graph, layer: Layer, inputs_after_cache: list[ir.Value]) -> None:
    inputs: list[ir.Value | None] = [*qkv_rows(graph, layer)]
    inputs += [*[None] * (3 - len(inputs)), *layer.past, *inputs_after_cache]
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "do_rotary": 1,
        "scale": layer.attention.attributes["scale"].as_float(),
    }
    attended = ir.node("GroupQueryAttention", inputs, attributes, domain=DOMAIN, num_outputs=3)
    graph.insert_before(layer.attention, attended)
    for old, new in zip((layer.result, *layer.present), attended.outputs, strict=True):
        replace_value(graph, old, new)
