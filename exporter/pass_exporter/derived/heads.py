"""Splits the merged product of q, k and v into heads with fewer nodes: each costs microseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import constant, initializer, only_user, take_place

HEADS_FIRST = (0, 2, 1, 3)
"""The `perm` of a Transpose [B,Q,heads,D] -> [B,heads,Q,D]."""


@dataclass(frozen=True)
class _Heads:
    """The heads of q, k or v as attention reads them: [B,count,Q,size]. rotary: None for v."""

    value: ir.Value
    rotary: ir.Node | None
    count: int
    size: int


def split_heads_together(graph: ir.Graph) -> None:
    """Replace Split, 3 Reshape, 3 Transpose, 2 RotaryEmbedding by Reshape, Transpose, Split,
    RotaryEmbedding, Split: q and k are rotated together. Layers with other nodes there do not
    change."""
    for split in [node for node in graph if node.op_type == "Split" and len(node.outputs) == 3]:
        q, k, v = (_heads(part) for part in split.outputs)
        if not (q and k and v) or not q.rotary or not k.rotary or v.rotary is not None:
            continue
        same_rotation = (
            q.rotary.inputs[1:] == k.rotary.inputs[1:]
            and q.rotary.attributes == k.rotary.attributes
        )
        if same_rotation and q.size == k.size == v.size:
            _rewrite(graph, split, q, k, v)


def norm_before_transpose(graph: ir.Graph) -> None:
    """Replace Transpose, RMSNormalization over D by RMSNormalization, Transpose: Qwen3's order,
    which other rewrites expect, in place of Gemma3's. The bits are the same."""
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
    keeps a size, in place of computed sizes."""
    for node in [node for node in graph if node.op_type == "Reshape"]:
        rows, shape = node.inputs
        sizes = None if shape is None else shape.producer()
        if rows is None or rows.shape is None or len(rows.shape) != 3 or sizes is None:
            continue
        # torch's exporter joins the shape of four sizes: B and Q, which it computes, -1 and D.
        if sizes.op_type != "Concat" or len(sizes.inputs) != 4:
            continue
        third, fourth = (constant(part) for part in sizes.inputs[-2:])
        if third is not None and fourth is not None and third == -1:
            head_size = int(fourth.item())
            by_head = initializer(graph, f"heads.{head_size}", np.array([0, 0, -1, head_size]))
            node.replace_input_with(1, by_head)
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def puts_heads_first(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == HEADS_FIRST


def _heads(part: ir.Value) -> _Heads | None:
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
    sizes = initializer(graph, f"heads.{first}+{second}", np.array([first, second]))
    return ir.node("Split", [heads, sizes], {"axis": 1}, num_outputs=2)
