"""Makes the adapter, which applies to look-ahead rows only, cheaper in the trunks for the CPU.

- The adapter's result is added to the look-ahead rows by a ScatterND. The portable trunk pads it
  with zeros to a whole window and adds that: one node more, which moves all rows.
- If the layer's input is rounded to 8 bits, the 8-bit codes of the look-ahead rows are gathered.
  The portable trunk gathers the rows before rounding, and rounds them a second time.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS


def scatter_adapter_results(graph: ir.Graph) -> None:
    """Replace Pad, Add by ScatterND in every layer that the adapter changes."""
    pads = adapter_pads(graph)
    if not pads:
        return
    indices = _row_indices(graph)
    for pad in pads:
        (use,) = pad.outputs[0].uses()
        add = use.node
        scatter = ir.node(
            "ScatterND", [add.inputs[1 - use.idx], indices, pad.inputs[0]], {"reduction": "add"}
        )
        graph.insert_before(add, scatter)
        take_place(add.outputs[0], scatter.outputs[0])
        graph.remove([add, pad], safe=True)


def adapter_pads(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes by which the portable trunk pads the adapter's products to whole windows."""
    rows = next((value for value in graph.inputs if value.name == LOOKAHEAD_ROWS), None)
    return [] if rows is None else [node for node in graph if _pads_rows(node, rows)]


def gather_codes(graph: ir.Graph) -> None:
    """Replace Gather, QuantizeLinear by a Gather of codes where all rows have the same scale."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        source = None if node.inputs[0] is None else node.inputs[0].producer()
        if source is None or source.op_type != "Gather" or source.inputs[0] is None:
            continue
        users = [use.node for use in source.inputs[0].uses()]
        same = [
            user
            for user in users
            if user.op_type == "QuantizeLinear" and _scale(user) == _scale(node)
        ]
        if same:
            gather = ir.node("Gather", [same[0].outputs[0], source.inputs[1]], source.attributes)
            graph.insert_before(node, gather)
            node.outputs[0].replace_all_uses_with(gather.outputs[0])
            graph.remove([node, source], safe=True)


def _scale(node: ir.Node) -> float | None:
    """Return the scale of a QuantizeLinear, None if it is not static."""
    scale = node.inputs[1]
    return None if scale is None or scale.const_value is None else float(scale.const_value.numpy())


def _pads_rows(node: ir.Node, rows: ir.Value) -> bool:
    """Whether a node pads a tensor from the look-ahead rows `rows` to the whole window."""
    return node.op_type == "Pad" and _from_shape(node.inputs[1], rows)


def _from_shape(value: ir.Value | None, rows: ir.Value) -> bool:
    """Whether `value` is computed from the shape of `rows`."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    return (
        rows in node.inputs
        if node.op_type == "Shape"
        else any(_from_shape(each, rows) for each in node.inputs)
    )


def _row_indices(graph: ir.Graph) -> ir.Value:
    """[B,A,2]: the slot and the row of each look-ahead row. Its nodes begin the graph."""
    rows, length = (
        next(each for each in graph.inputs if each.name == name)
        for name in (LOOKAHEAD_ROWS, "length")
    )
    nodes: list[ir.Node] = []

    def constant(name: str, value: int | list[int]) -> ir.Value:
        return initializer(graph, f"adapter_rows.{name}", np.array(value))

    def add(op: str, *values: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    slots = add("Range", constant("zero", 0), add("Size", length), constant("one", 1))
    by_slot = add("Unsqueeze", slots, constant("slot_axes", [1, 2]))  # [B,1,1]
    by_row = add("Unsqueeze", rows, constant("row_axes", [0, 2]))  # [1,A,1]
    # [3]: B, A, 1
    sizes = add(
        "Concat", add("Shape", length), add("Shape", rows), constant("one_index", [1]), axis=0
    )
    indices = add("Concat", add("Expand", by_slot, sizes), add("Expand", by_row, sizes), axis=2)
    graph.insert_before(graph[0], nodes)
    return indices
