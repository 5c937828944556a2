"""Makes q, k and v parts of one product in families where other nodes are between.

`GroupQueryAttention` reads the whole product, and `heads.split_heads_together` splits it, if one
Split makes the parts.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place


def split_by_one_node(graph: ir.Graph) -> None:
    """Replace three Slices of a product's last axis, into adjacent parts, by one Split. (Phi3)"""
    cuts: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "Slice" and node.inputs[0] is not None and _cuts_last_axis(node):
            cuts.setdefault(node.inputs[0], []).append(node)
    for product, slices in cuts.items():
        widths = [
            node.outputs[0].shape[-1] if node.outputs[0].shape is not None else None
            for node in slices
        ]
        sizes = [width for width in widths if isinstance(width, int)]
        starts = [_number(node.inputs[1]) for node in slices]
        if len(slices) != 3 or len(sizes) != 3 or starts != [0, sizes[0], sizes[0] + sizes[1]]:
            continue
        parts = initializer(graph, "projections." + "+".join(map(str, sizes)), np.array(sizes))
        split = ir.node("Split", [product, parts], {"axis": -1}, num_outputs=3)
        graph.insert_before(slices[0], split)
        for node, part in zip(slices, split.outputs, strict=True):
            take_place(node.outputs[0], part)
        graph.remove(slices, safe=True)


def add_biases_before_split(graph: ir.Graph) -> None:
    """Replace Split and an Add of each part's bias by an Add of all biases and a Split. (Qwen2)"""
    for split in [node for node in graph if node.op_type == "Split"]:
        adds = [use.node for part in split.outputs for use in part.uses()]
        biases = [_bias(add, part) for add, part in zip(adds, split.outputs, strict=False)]
        found = [bias for bias in biases if bias is not None]
        if not len(found) == len(split.outputs) == len(adds):
            continue
        merged = np.concatenate(
            [bias.const_value.numpy() for bias in found if bias.const_value is not None]
        )
        name = "+".join(str(bias.name) for bias in found)
        total = ir.node("Add", [split.inputs[0], initializer(graph, name, merged)])
        parts = ir.node(
            "Split", [total.outputs[0], split.inputs[1]], split.attributes, num_outputs=len(adds)
        )
        graph.insert_before(split, [total, parts])
        for add, part in zip(adds, parts.outputs, strict=True):
            take_place(add.outputs[0], part)
        graph.remove([*adds, split], safe=True)


def _cuts_last_axis(node: ir.Node) -> bool:
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    step = node.inputs[4] if len(node.inputs) > 4 else None
    return (
        rank is not None
        and _number(node.inputs[3]) in (-1, rank - 1)
        and (step is None or _number(step) == 1)
    )


def _number(value: ir.Value | None) -> int | None:
    """Return the only number of a constant; None if it is no such constant."""
    constant = None if value is None else value.const_value
    return int(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def _bias(add: ir.Node, part: ir.Value) -> ir.Value | None:
    """What `add` adds to `part`, if that is a constant vector."""
    if add.op_type != "Add" or part not in add.inputs:
        return None
    other = next((value for value in add.inputs if value is not part), None)
    return (
        other
        if other is not None and other.const_value is not None and len(other.const_value.shape) == 1
        else None
    )
