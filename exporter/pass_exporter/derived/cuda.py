"""A trunk for ONNX Runtime's CUDA provider in which each layer's attention is one GroupQueryAttention.

`Attention` with a mask copies K and V out to all query heads where they share them, in every layer and pass (fp16:
`LaunchUngroup` before the memory-efficient kernel). GroupQueryAttention with `attention_bias` does not: it multiplies
with the cache as it lies, in kernels that are not fused (pull request 29525 of ONNX Runtime, which 1.31.1 has). Which
is faster only a GPU can say, so an export makes this trunk only where it is asked for.

The operator takes `total_sequence_length` from the host, where a captured pass cannot have the text's length. It gets
the capacity, which is a shape; `seqlens_k`, on the device, says how many entries are valid. It has kernels for 16-bit
numbers alone, and refuses batches of windows with several rows, so this trunk is for one sequence.
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
    OtherForm,
    common_rows,
    read_layer,
    rotation_tables,
    take_place,
)
from pass_exporter.derived.heads import norm_before_turning
from pass_exporter.trunk.graph import initializer
from pass_runtime.bundle.manifest import DerivedTrunk
from pass_runtime.errors import PassError

FILE = "trunk.cuda.one.onnx"


def write_trunk_for_cuda(trunk: Path, max_capacity: int) -> tuple[DerivedTrunk, ...]:
    """Write the graph beside `trunk`, the portable one, whose weights stay in their file. PassError where the model's
    attention is not one that the operator computes."""
    model = ir.load(trunk)
    norm_before_turning(model.graph)
    try:
        _replace_attention(model, max_capacity)
    except OtherForm:
        raise PassError(
            "--cuda-attention group-query: the operator cannot rotate this model's heads; leave the option out"
        ) from None
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, trunk.with_name(FILE))
    return (DerivedTrunk(file=FILE, device="cuda", batch=1),)


def _replace_attention(model: ir.Model, max_capacity: int) -> None:
    graph = model.graph
    attentions = [node for node in graph if node.op_type == "Attention"]
    layers = [read_layer(node, None) for node in attentions]
    inputs = {str(value.name): value for value in graph.inputs}
    nodes: list[ir.Node] = []

    def number(name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        return initializer(graph, f"group_query.{name}", np.array(value, dtype))

    def add(op: str, *values: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    length, row_position, one = inputs["length"], inputs["row_position"], number("one", [1])
    # The number of rows as a tensor of the device: from a sum, because a size is on the host.
    rows = add("ReduceSum", add("Expand", one, add("Shape", row_position)), keepdims=1)
    valid = add("Cast", add("Sub", add("Add", length, rows), one), to=int(ir.DataType.INT32))
    capacity = add("Cast", add("Shape", layers[0].past[0], start=2, end=3), to=int(ir.DataType.INT32))
    positions = add("Add", add("Unsqueeze", length, one), row_position)  # [B,Q]
    graph.insert_before(graph[0], nodes)
    rotations = dict.fromkeys(layer.rotation for layer in layers)
    tables = {pair: rotation_tables(model, pair, i, max_capacity) for i, pair in enumerate(rotations)}
    biases: dict[ir.Value, ir.Value] = {}
    for layer in layers:
        bias = _bias(graph, layer, biases)
        _replace(graph, layer, [valid, capacity, *tables[layer.rotation], positions, bias])
    graph.opset_imports[DOMAIN] = 1


def _bias(graph: ir.Graph, layer: Layer, known: dict[ir.Value, ir.Value]) -> ir.Value:
    """The mask [B,1,Q,S] of a layer as numbers that are added to the scores, made once for all that share it."""
    mask, dtype = layer.attention.inputs[3], layer.past[0].dtype
    assert mask is not None and dtype is not None
    if mask not in known:
        seen, unseen = np.zeros((), dtype.numpy()), np.array(np.finfo(dtype.numpy()).min, dtype.numpy())
        values = [initializer(graph, f"group_query.{name}", n) for name, n in (("seen", seen), ("unseen", unseen))]
        node = ir.node("Where", [mask, *values])
        graph.insert_before(layer.attention, node)
        known[mask] = node.outputs[0]
    return known[mask]


def _replace(graph: ir.Graph, layer: Layer, shared: list[ir.Value]) -> None:
    rows: list[ir.Value | None] = [*common_rows(graph, layer)]
    rows += [None] * (3 - len(rows))
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "do_rotary": 1,
        "scale": layer.attention.attributes["scale"].as_float(),
    }
    attended = ir.node("GroupQueryAttention", [*rows, *layer.past, *shared], attributes, domain=DOMAIN, num_outputs=3)
    graph.insert_before(layer.attention, attended)
    for old, new in zip((layer.result, *layer.present), attended.outputs, strict=True):
        take_place(graph, old, new)
