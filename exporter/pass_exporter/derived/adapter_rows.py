"""Makes the adapter, which applies to look-ahead rows only, cheaper in the trunks for the CPU.

- A ScatterND adds the adapter's results to the look-ahead rows. The portable trunk has two nodes,
  which touch all rows: it pads the results with zeros to the whole window, and adds that.
- If the layer's input is rounded to 8 bits, the adapter gathers the look-ahead rows from the codes.
  The portable trunk gathers the rows from the input itself, and rounds them a second time.
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
    """Return the Pad nodes with which the portable trunk pads the adapter's products to whole
    windows: those whose padding depends on the number of look-ahead rows."""
    rows = next((value for value in graph.inputs if value.name == LOOKAHEAD_ROWS), None)
    pads = [node for node in graph if node.op_type == "Pad"]
    return [] if rows is None else [pad for pad in pads if _depends_on_shape(pad.inputs[1], rows)]


def gather_codes(graph: ir.Graph) -> None:
    """Replace Gather, QuantizeLinear by a Gather of codes, if another QuantizeLinear rounds all
    rows with the same scale."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        rows_gather = None if node.inputs[0] is None else node.inputs[0].producer()
        if rows_gather is None or rows_gather.op_type != "Gather" or rows_gather.inputs[0] is None:
            continue
        readers = [use.node for use in rows_gather.inputs[0].uses()]
        same_scale = [
            reader
            for reader in readers
            if reader.op_type == "QuantizeLinear" and _scale(reader) == _scale(node)
        ]
        if same_scale:
            codes, rows = same_scale[0].outputs[0], rows_gather.inputs[1]
            gather = ir.node("Gather", [codes, rows], rows_gather.attributes)
            graph.insert_before(node, gather)
            node.outputs[0].replace_all_uses_with(gather.outputs[0])
            graph.remove([node, rows_gather], safe=True)


def _scale(node: ir.Node) -> float | None:
    """Return the scale of a QuantizeLinear; None if it is not a constant."""
    scale = node.inputs[1]
    return None if scale is None or scale.const_value is None else float(scale.const_value.numpy())


def _depends_on_shape(value: ir.Value | None, source: ir.Value) -> bool:
    """Whether `value` is computed from the shape of `source`."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    if node.op_type == "Shape":
        return source in node.inputs
    return any(_depends_on_shape(each, source) for each in node.inputs)


def _row_indices(graph: ir.Graph) -> ir.Value:
    """Return the indices [B,A,2] of the A look-ahead rows of every slot: slot and row. The nodes
    that compute them are put at the beginning of the graph."""
    inputs = {value.name: value for value in graph.inputs}
    rows, length = inputs[LOOKAHEAD_ROWS], inputs["length"]
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
