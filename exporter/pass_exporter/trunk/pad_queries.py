"""A spare query row for every Attention, so that windows of all widths agree bit for bit on ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def pad_queries(model: ir.Model) -> None:
    """Give every Attention a second copy of its last query row, and drop its result.

    ONNX Runtime attends with other kernels for one row than for several, which differ by float32 rounding. Harmless by
    itself, but 8-bit rounding of activations blows it up: a plain pass would part from a wide one by half a logit.
    With this no Attention has one row, and all window widths agree bit for bit.
    """
    graph = model.graph
    parts = {"last": -1, "end": np.iinfo(np.int64).max, "start": 0, "axis": 2}
    sizes = {name: _constant(graph, f"pad_queries.{name}", value) for name, value in parts.items()}
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3]
        assert query is not None and mask is not None
        if mask not in masks:
            masks[mask] = _with_last_row(graph, node, mask, sizes)
        node.replace_input_with(0, _with_last_row(graph, node, query, sizes))
        node.replace_input_with(3, masks[mask])
        padded = node.outputs[0]
        first = ir.node("Slice", [padded, sizes["start"], sizes["last"], sizes["axis"]])
        first.outputs[0].shape, first.outputs[0].type = padded.shape, padded.type
        padded.shape = None
        padded.replace_all_uses_with(first.outputs[0])
        first.replace_input_with(0, padded)
        graph.insert_after(node, first)


def _with_last_row(graph: ir.Graph, before: ir.Node, value: ir.Value, sizes: dict[str, ir.Value]) -> ir.Value:
    """[B,H,Q,...] -> [B,H,Q+1,...]"""
    last = ir.node("Slice", [value, sizes["last"], sizes["end"], sizes["axis"]])
    both = ir.node("Concat", [value, last.outputs[0]], {"axis": 2})
    for node in (last, both):
        node.outputs[0].type = value.type
    graph.insert_before(before, [last, both])
    return both.outputs[0]


def _constant(graph: ir.Graph, name: str, value: int) -> ir.Value:
    constant = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    constant.const_value = ir.tensor(np.array([value], np.int64), name=name)
    graph.register_initializer(constant)
    return constant
