"""Attention with the query heads of a group as rows of their key head.

Grouped-query attention of H heads over KVH is attention of KVH heads over G = H/KVH times as many rows: [B,H,Q,D] and
[B,KVH,G*Q,D] are the same memory. ONNX Runtime multiplies one row with other kernels than several, which differ by
float32 rounding, and 8-bit activations blow that up until a narrow window writes another text than a wide one; folded,
no product has one row, at no cost. (GroupQueryAttention was no faster, has the same two kinds of rounding, and refuses
several rows in a batch. The portable trunk has a spare query row instead, see `trunk.pad_queries`.)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def fold_groups(graph: ir.Graph) -> None:
    """Fold every Attention that has groups. The mask becomes numbers, once for all layers instead of in each."""
    masks: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, key, value, mask = node.inputs
        assert query is not None and key is not None and value is not None and mask is not None
        query, mask = _without_spare_row(query), _without_spare_row(mask)
        heads, kv_heads = _heads(query), _heads(key)
        group = heads // kv_heads
        if group == 1:
            continue  # nothing to fold: spare rows stay where they are
        if (mask, group) not in masks:
            masks[mask, group] = _tiled(graph, node, mask, group)
        shape = initializer(graph, f"fold.{kv_heads}x{_head_size(key)}", np.array([0, kv_heads, -1, _head_size(key)]))
        back = initializer(graph, f"fold.{heads}x{_head_size(value)}", np.array([0, heads, -1, _head_size(value)]))
        folded = ir.node("Reshape", [query, shape])
        attended = ir.node("Attention", [folded.outputs[0], key, value, masks[mask, group]], node.attributes)
        rows = ir.node("Reshape", [attended.outputs[0], back])
        graph.insert_before(node, [folded, attended, rows])
        result = _without_slice(node.outputs[0])
        rows.outputs[0].shape, rows.outputs[0].type = result.shape, result.type
        result.replace_all_uses_with(rows.outputs[0])


def _tiled(graph: ir.Graph, before: ir.Node, mask: ir.Value, group: int) -> ir.Value:
    """[B,1,Q,S] bool -> [B,1,G*Q,S] float32 to be added to scores."""
    seen = initializer(graph, "mask.seen", np.array(0, np.float32))
    unseen = initializer(graph, "mask.unseen", np.array(np.finfo(np.float32).min, np.float32))
    numbers = ir.node("Where", [mask, seen, unseen])
    tiled = ir.node("Concat", [numbers.outputs[0]] * group, {"axis": 2})
    graph.insert_before(before, [numbers, tiled])
    return tiled.outputs[0]


def _heads(value: ir.Value) -> int:
    """Of [B,heads,rows,D]."""
    assert value.shape is not None
    heads = value.shape[1]
    assert isinstance(heads, int)
    return heads


def _head_size(value: ir.Value) -> int:
    assert value.shape is not None
    size = value.shape[3]
    assert isinstance(size, int)
    return size


def _without_spare_row(value: ir.Value) -> ir.Value:
    """What `trunk.pad_queries` appended a copy of its last row to."""
    node = value.producer()
    last = node.inputs[1].producer() if node is not None and node.op_type == "Concat" and node.inputs[1] else None
    spare = node is not None and last is not None and last.op_type == "Slice" and last.inputs[0] is node.inputs[0]
    return node.inputs[0] if spare and node is not None and node.inputs[0] is not None else value


def _without_slice(output: ir.Value) -> ir.Value:
    """The attention's result behind the Slice that drops the spare row, where there is one."""
    users = [use.node for use in output.uses()]
    return users[0].outputs[0] if len(users) == 1 and users[0].op_type == "Slice" else output
