"""Query, key and value heads cut out of their common product in one piece.

The portable trunk splits the product of q, k and v, and turns and rotates each part by itself: eight nodes that move
next to nothing. A node costs microseconds however small it is, once the weights of a layer have passed the caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer

TO_HEADS = (0, 2, 1, 3)
"""[B,Q,heads,D] -> [B,heads,Q,D]"""


@dataclass(frozen=True)
class _Heads:
    """[B,heads,Q,D] cut out of a product; rotated where it is a query or a key."""

    value: ir.Value
    rotary: ir.Node | None
    count: int
    size: int


def cut_heads_at_once(graph: ir.Graph) -> None:
    """Split, 3 Reshape, 3 Transpose, 2 RotaryEmbedding -> Reshape, Transpose, Split, RotaryEmbedding, Split.

    Only where q and k go straight from the product to the same rotation (a model that normalizes them has more there).
    """
    for split in [node for node in graph if node.op_type == "Split" and len(node.outputs) == 3]:
        q, k, v = (_heads(part) for part in split.outputs)
        if q and k and v and _alike(q, k) and v.rotary is None and q.size == v.size:
            _cut(graph, split, q, k, v)


def _heads(part: ir.Value) -> _Heads | None:
    reshape = _only_user(part, "Reshape")
    turn = _only_user(reshape.outputs[0], "Transpose") if reshape is not None else None
    if turn is None or tuple(turn.attributes["perm"].as_ints()) != TO_HEADS:
        return None
    rotary = _only_user(turn.outputs[0], "RotaryEmbedding")
    value = turn.outputs[0] if rotary is None else rotary.outputs[0]
    shape = value.shape
    if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return None
    return _Heads(value, rotary, shape[1], shape[3])


def _alike(q: _Heads, k: _Heads) -> bool:
    """Whether one node can rotate both."""
    if q.rotary is None or k.rotary is None or q.size != k.size:
        return False
    return q.rotary.inputs[1:] == k.rotary.inputs[1:] and q.rotary.attributes == k.rotary.attributes


def _cut(graph: ir.Graph, split: ir.Node, q: _Heads, k: _Heads, v: _Heads) -> None:
    assert q.rotary is not None and split.inputs[0] is not None
    total = q.count + k.count + v.count
    shape = initializer(graph, f"heads.{total}x{q.size}", np.array([0, 0, total, q.size]))
    rotated = _sizes(graph, q.count + k.count, v.count)
    queries = _sizes(graph, q.count, k.count)
    rows = ir.node("Reshape", [split.inputs[0], shape])
    turned = ir.node("Transpose", [rows.outputs[0]], {"perm": TO_HEADS})
    first = ir.node("Split", [turned.outputs[0], rotated], {"axis": 1}, num_outputs=2)
    rotary = ir.node("RotaryEmbedding", [first.outputs[0], *q.rotary.inputs[1:]], q.rotary.attributes)
    second = ir.node("Split", [rotary.outputs[0], queries], {"axis": 1}, num_outputs=2)
    graph.insert_before(q.rotary, [rows, turned, first, rotary, second])
    for old, new in ((q, second.outputs[0]), (k, second.outputs[1]), (v, first.outputs[1])):
        new.shape, new.type = old.value.shape, old.value.type
        old.value.replace_all_uses_with(new)


def _sizes(graph: ir.Graph, first: int, second: int) -> ir.Value:
    return initializer(graph, f"heads.{first}+{second}", np.array([first, second]))


def _only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None
