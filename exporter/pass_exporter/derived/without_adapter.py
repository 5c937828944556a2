"""A trunk without the adapter of the look-ahead rows, for passes that have none.

The adapter's products are empty there, but each of its nodes still costs 1 to 1.5 microseconds: SmolLM2 has 160 of
them, which are 2 to 3 % of a pass with one row.
"""

from __future__ import annotations

import onnx_ir as ir


def drop_adapter(graph: ir.Graph) -> bool:
    """Let the rows to which the adapter adds stay as they are, after `adapter_rows.add_in_place`; False if there is no
    adapter. Its nodes are left without readers."""
    nodes = [node for node in graph if node.op_type == "ScatterND"]
    for node in nodes:
        kept = node.inputs[0]
        assert kept is not None
        node.outputs[0].replace_all_uses_with(kept)
    return bool(nodes)
