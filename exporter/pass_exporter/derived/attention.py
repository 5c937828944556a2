"""Folds the query heads of a group into rows of the key head that they share.

Grouped-query attention with H heads and KVH key heads equals attention with KVH heads and G = H/KVH
times as many rows, because [B,H,Q,D] and [B,KVH,G*Q,D] are the same memory. So attention always has
several query rows; ONNX Runtime's kernels for a single row round differently (`trunk.pad_queries`
says why that matters). Models without groups may get a spare query row instead. The trunk for
batches uses this, because GroupQueryAttention (`derived.group_query`) does not accept batches of
windows with several rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place


def fold_groups(graph: ir.Graph) -> bool:
    """Fold every Attention. Return False if the model has no groups.

    Each bool mask is converted to float once, for all layers that share it.
    """
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, key, value, mask = node.inputs
        assert query is not None and key is not None and value is not None and mask is not None
        heads, kv_heads = _size(query, 1), _size(key, 1)
        if heads == kv_heads:
            return False
        if mask not in masks:
            masks[mask] = _tiled(graph, node, mask, heads // kv_heads)
        key_size, value_size = _size(key, 3), _size(value, 3)
        by_key_head = initializer(
            graph, f"fold.{kv_heads}x{key_size}", np.array([0, kv_heads, -1, key_size])
        )
        by_head = initializer(
            graph, f"fold.{heads}x{value_size}", np.array([0, heads, -1, value_size])
        )
        folded = ir.node("Reshape", [query, by_key_head])
        attended = ir.node(
            "Attention", [folded.outputs[0], key, value, masks[mask]], node.attributes
        )
        rows = ir.node("Reshape", [attended.outputs[0], by_head])
        graph.insert_before(node, [folded, attended, rows])
        take_place(node.outputs[0], rows.outputs[0])
    return True


def _tiled(graph: ir.Graph, before: ir.Node, mask: ir.Value, group: int) -> ir.Value:
    """mask [B,1,Q,S] bool -> bias [B,1,G*Q,S] float32, which is added to the attention scores."""
    seen = initializer(graph, "mask.seen", np.array(0, np.float32))
    unseen = initializer(graph, "mask.unseen", np.array(np.finfo(np.float32).min, np.float32))
    bias = ir.node("Where", [mask, seen, unseen])
    tiled = ir.node("Concat", [bias.outputs[0]] * group, {"axis": 2})
    graph.insert_before(before, [bias, tiled])
    return tiled.outputs[0]


def _size(value: ir.Value, axis: int) -> int:
    """Return a static size of [B,heads,rows,D]."""
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size
