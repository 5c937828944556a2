"""Removes the adapter from a derived trunk, for passes without look-ahead rows.

In such passes the adapter changes nothing, but on a CPU each of its nodes still costs 1 to 1.5
microseconds: the 160 nodes of SmolLM2's adapter take 2 to 3 % of a pass with one row.
"""

from __future__ import annotations

import onnx_ir as ir


def drop_adapter(graph: ir.Graph, op_type: str) -> bool:
    """Bypass the nodes that add the adapter's results. Return False if there are none.

    op_type: the type of these nodes, "ScatterND" after `adapter_rows.scatter_adapter_results` and
    "GatedAdd" after `adapter_gate.gate_adapter_results`. All nodes of the adapter stay in the graph
    without readers; RemoveUnusedNodesPass removes them.
    """
    nodes = [node for node in graph if node.op_type == op_type]
    for node in nodes:
        layer_result = node.inputs[0]
        assert layer_result is not None
        node.outputs[0].replace_all_uses_with(layer_result)
    return bool(nodes)
