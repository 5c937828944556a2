"""A trunk without the adapter of the look-ahead rows, for passes that have none.

The adapter's products are empty there, but each of its nodes still costs about a microsecond: SmolLM2 has 200 of them,
which are 4 to 6 % of a pass with one row.
"""

from __future__ import annotations

import onnx_ir as ir

from pass_runtime.bundle.tensors import ROWS_INPUT


def drop_adapter(graph: ir.Graph) -> bool:
    """Let what the adapter changes stay as it is; False if there is no adapter. Its nodes are left without readers."""
    rows = next((value for value in graph.inputs if value.name == ROWS_INPUT), None)
    if rows is None:
        return False
    dropped = False
    for pad in [node for node in graph if node.op_type == "Pad" and _from_shape(node.inputs[1], rows)]:
        for use in list(pad.outputs[0].uses()):
            kept = use.node.inputs[1 - use.idx] if use.node.op_type == "Add" else None
            if kept is not None:
                use.node.outputs[0].replace_all_uses_with(kept)
                dropped = True
    return dropped


def _from_shape(value: ir.Value | None, rows: ir.Value) -> bool:
    """Whether a tensor of sizes is computed from the number of look-ahead rows."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    return rows in node.inputs if node.op_type == "Shape" else any(_from_shape(each, rows) for each in node.inputs)
