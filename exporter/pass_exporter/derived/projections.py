"""Makes q, k and v the outputs of one Split of their merged product, in the families of models in
which the portable trunk has other nodes in its place.

Then GroupQueryAttention can read the whole product (`group_query.qkv_rows`), and
`heads.split_heads_together` can split it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place


def split_by_one_node(graph: ir.Graph) -> None:
    """Replace three Slices of a product's last axis, into adjacent parts, by one Split. (Phi3)"""
    slices_of: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "Slice" and node.inputs[0] is not None and _slices_last_axis(node):
            slices_of.setdefault(node.inputs[0], []).append(node)
    for product, slices in slices_of.items():
        shapes = [node.outputs[0].shape for node in slices]
        widths = [None if shape is None else shape[-1] for shape in shapes]
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
    """Replace a Split, and the Add of a bias to each part, by an Add of all biases joined, and a
    Split of the sum. (Qwen2)"""
    for split in [node for node in graph if node.op_type == "Split"]:
        adds = [use.node for part in split.outputs for use in part.uses()]
        # If a part has several readers or none, the lists do not match, as is checked below.
        pairs = zip(adds, split.outputs, strict=False)
        biases = [bias for add, part in pairs if (bias := _bias(add, part)) is not None]
        if not len(biases) == len(split.outputs) == len(adds):
            continue
        joined = np.concatenate(
            [bias.const_value.numpy() for bias in biases if bias.const_value is not None]
        )
        name = "+".join(str(bias.name) for bias in biases)
        total = ir.node("Add", [split.inputs[0], initializer(graph, name, joined)])
        parts = ir.node(
            "Split", [total.outputs[0], split.inputs[1]], split.attributes, num_outputs=len(adds)
        )
        graph.insert_before(split, [total, parts])
        for add, part in zip(adds, parts.outputs, strict=True):
            take_place(add.outputs[0], part)
        graph.remove([*adds, split], safe=True)


def _slices_last_axis(node: ir.Node) -> bool:
    """Whether a Slice takes adjacent elements of the last axis."""
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    step = node.inputs[4] if len(node.inputs) > 4 else None
    return (
        rank is not None
        and _number(node.inputs[3]) in (-1, rank - 1)
        and (step is None or _number(step) == 1)
    )


def _number(value: ir.Value | None) -> int | None:
    """Return the number of a constant that has one element; None if `value` is something else."""
    constant = None if value is None else value.const_value
    return int(constant.numpy().item()) if constant is not None and constant.size == 1 else None


def _bias(add: ir.Node, part: ir.Value) -> ir.Value | None:
    """Return what `add` adds to `part`; None if this is not a constant vector."""
    if add.op_type != "Add" or part not in add.inputs:
        return None
    bias = next((value for value in add.inputs if value is not part), None)
    if bias is None or bias.const_value is None or len(bias.const_value.shape) != 1:
        return None
    return bias
