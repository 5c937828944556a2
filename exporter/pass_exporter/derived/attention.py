"""Folds the query heads that share a key head into query rows of that head, for the CPU trunk.

Grouped-query attention with H heads and KVH key heads equals attention with KVH heads and G = H/KVH
times as many rows, because [B,H,Q,D] and [B,KVH,G*Q,D] are the same memory. So attention has
several query rows even in a window of one row. That is wanted, because ONNX Runtime's kernels for a
single row round differently (`trunk.pad_queries` says why that matters). Models whose query heads
share no key heads may get a spare query row instead.

The trunk for batches uses this; the trunk for one sequence has GroupQueryAttention
(`derived.group_query`), which does not accept batches of windows with several rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place


def fold_groups(graph: ir.Graph) -> bool:
    """Fold every Attention. Return False, and change nothing, if no heads share a key head."""
    biases: dict[ir.Value, ir.Value] = {}  # by mask: layers share masks
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, key, value, mask = node.inputs
        assert query is not None and key is not None and value is not None and mask is not None
        heads, kv_heads = _size(query, 1), _size(key, 1)
        if heads == kv_heads:
            return False
        if mask not in biases:
            biases[mask] = _tiled_bias(graph, node, mask, heads // kv_heads)
        key_size, value_size = _size(key, 3), _size(value, 3)
        folded_shape = initializer(
            graph, f"fold.{kv_heads}x{key_size}", np.array([0, kv_heads, -1, key_size])
        )
        unfolded_shape = initializer(
            graph, f"fold.{heads}x{value_size}", np.array([0, heads, -1, value_size])
        )
        folded = ir.node("Reshape", [query, folded_shape])
        attended = ir.node(
            "Attention", [folded.outputs[0], key, value, biases[mask]], node.attributes
        )
        unfolded = ir.node("Reshape", [attended.outputs[0], unfolded_shape])
        graph.insert_before(node, [folded, attended, unfolded])
        take_place(node.outputs[0], unfolded.outputs[0])
    return True


def _tiled_bias(graph: ir.Graph, before: ir.Node, mask: ir.Value, group: int) -> ir.Value:
    """Return a bias [B,1,G*Q,S] float32 that is added to the attention scores, the same for all G
    (`group`) heads. mask: [B,1,Q,S] bool. The new nodes are put before the node `before`."""
    seen = initializer(graph, "mask.seen", np.array(0, np.float32))
    unseen = initializer(graph, "mask.unseen", np.array(np.finfo(np.float32).min, np.float32))
    bias = ir.node("Where", [mask, seen, unseen])
    tiled = ir.node("Concat", [bias.outputs[0]] * group, {"axis": 2})
    graph.insert_before(before, [bias, tiled])
    return tiled.outputs[0]


def _size(value: ir.Value, axis: int) -> int:
    """Return the size of [B,heads,rows,D] along an axis on which it is static."""
    assert value.shape is not None
    size = value.shape[axis]
    assert isinstance(size, int)
    return size
