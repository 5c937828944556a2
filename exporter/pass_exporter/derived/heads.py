"""Splits the merged product of q, k and v into heads with fewer nodes, in derived trunks.

The portable trunk splits the product, and reshapes, transposes and rotates each part separately.
These nine nodes move little data, but each costs microseconds on a CPU, because the layer's weights
have just evicted everything else from its caches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place

HEADS_FIRST = (0, 2, 1, 3)
"""The `perm` of a Transpose [B,Q,heads,D] -> [B,heads,Q,D]."""


@dataclass(frozen=True)
class _Heads:
    """The heads of q, k or v as attention reads them: `value` [B,count,Q,size].

    rotary: the node that rotates them, or None, as for v.
    """

    value: ir.Value
    rotary: ir.Node | None
    count: int
    size: int


def split_heads_together(graph: ir.Graph) -> None:
    """Replace Split, 3 Reshape, 3 Transpose, 2 RotaryEmbedding by Reshape, Transpose, Split,
    RotaryEmbedding, Split. q and k are rotated together, and split afterwards.

    Layers with other nodes between the product and the rotation, such as a norm, do not change.
    """
    for split in [node for node in graph if node.op_type == "Split" and len(node.outputs) == 3]:
        q, k, v = (_heads(part) for part in split.outputs)
        if q and k and v and _same_rotation(q, k) and v.rotary is None and q.size == v.size:
            _rewrite(graph, split, q, k, v)


def norm_before_transpose(graph: ir.Graph) -> None:
    """Replace Transpose, RMSNormalization over D by RMSNormalization, Transpose. The results are
    bit for bit the same.

    Gemma3 has its norms of q and k after the Transpose, Qwen3 before it. Other rewrites expect
    Qwen3's order.
    """
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        source, scale = norm.inputs
        transpose = None if source is None or len(source.uses()) != 1 else source.producer()
        if transpose is None or not puts_heads_first(transpose):
            continue
        normed = ir.node("RMSNormalization", [transpose.inputs[0], scale], norm.attributes)
        transposed = ir.node("Transpose", normed.outputs, {"perm": HEADS_FIRST})
        graph.insert_before(norm, [normed, transposed])
        take_place(norm.outputs[0], transposed.outputs[0])
        graph.remove([norm, transpose], safe=True)


def split_heads_by_constant(graph: ir.Graph) -> None:
    """Give every Reshape [B,Q,heads*D] -> [B,Q,heads,D] the constant shape [0,0,-1,D], in which 0
    keeps a size. This removes the nodes with which the portable trunk computes B and Q."""
    for node in [node for node in graph if node.op_type == "Reshape"]:
        rows, shape = node.inputs
        sizes = None if shape is None else shape.producer()
        if (
            rows is None
            or rows.shape is None
            or len(rows.shape) != 3
            or sizes is None
            or sizes.op_type != "Concat"
        ):
            continue
        # torch's exporter joins the shape of four sizes: B and Q, which it computes, -1 and D.
        third, fourth = (None if part is None else part.const_value for part in sizes.inputs[-2:])
        if (
            len(sizes.inputs) == 4
            and third is not None
            and fourth is not None
            and third.numpy() == -1
        ):
            constant = np.array([0, 0, -1, int(fourth.numpy().item())])
            node.replace_input_with(1, initializer(graph, f"heads.{constant[-1]}", constant))
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def puts_heads_first(node: ir.Node) -> bool:
    """Whether a node is the Transpose [B,Q,heads,D] -> [B,heads,Q,D]."""
    return node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == HEADS_FIRST


def _heads(part: ir.Value) -> _Heads | None:
    """Follow q, k or v from the Split to the attention; None if other nodes are between."""
    reshape = only_user(part, "Reshape")
    transpose = only_user(reshape.outputs[0], "Transpose") if reshape is not None else None
    if transpose is None or not puts_heads_first(transpose):
        return None
    rotary = only_user(transpose.outputs[0], "RotaryEmbedding")
    value = transpose.outputs[0] if rotary is None else rotary.outputs[0]
    shape = value.shape
    if shape is None or not isinstance(shape[1], int) or not isinstance(shape[3], int):
        return None
    return _Heads(value, rotary, shape[1], shape[3])


def _same_rotation(q: _Heads, k: _Heads) -> bool:
    """Whether one node can rotate both q and k."""
    if q.rotary is None or k.rotary is None or q.size != k.size:
        return False
    return q.rotary.inputs[1:] == k.rotary.inputs[1:] and q.rotary.attributes == k.rotary.attributes


def _rewrite(graph: ir.Graph, split: ir.Node, q: _Heads, k: _Heads, v: _Heads) -> None:
    assert q.rotary is not None and split.inputs[0] is not None
    total = q.count + k.count + v.count
    shape = initializer(graph, f"heads.{total}x{q.size}", np.array([0, 0, total, q.size]))
    by_row = ir.node("Reshape", [split.inputs[0], shape])
    by_head = ir.node("Transpose", [by_row.outputs[0]], {"perm": HEADS_FIRST})
    qk_and_v = _split_heads(graph, by_head.outputs[0], q.count + k.count, v.count)
    rotary = ir.node(
        "RotaryEmbedding", [qk_and_v.outputs[0], *q.rotary.inputs[1:]], q.rotary.attributes
    )
    q_and_k = _split_heads(graph, rotary.outputs[0], q.count, k.count)
    graph.insert_before(q.rotary, [by_row, by_head, qk_and_v, rotary, q_and_k])
    for old, new in ((q, q_and_k.outputs[0]), (k, q_and_k.outputs[1]), (v, qk_and_v.outputs[1])):
        take_place(old.value, new)


def _split_heads(graph: ir.Graph, heads: ir.Value, first: int, second: int) -> ir.Node:
    """Return a Split of [B,first+second,Q,D] into the first heads and the others."""
    sizes = initializer(graph, f"heads.{first}+{second}", np.array([first, second]))
    return ir.node("Split", [heads, sizes], {"axis": 1}, num_outputs=2)


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node that reads `value`; None if it has another type or there are several."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None
