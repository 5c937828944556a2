"""Adds the adapter's results with GatedAdd, ONNX Runtime's own operator, in the trunks for CUDA.

The portable trunk gathers the look-ahead rows, multiplies them by A and by B, pads the product to
the whole window and adds it: five nodes in every adapted layer. Here all rows are multiplied, and
GatedAdd adds those whose gate is 1: three nodes. On a GPU a row more costs nothing and a node a
launch. A gate is 1 where an id selects a look-ahead embedding. (A draft's row has such an id too if
there is no draft for it. Nothing that is emitted depends on that row.)

What is added to other rows is 0 times a finite number, so they keep their values. In passes without
look-ahead rows the three nodes would do nothing else; `drop_adapter` makes the graph for these.

Where the adapter's rows are rounded to 8 bits, its nodes stay: all rows would be rounded a second
time.
"""

from __future__ import annotations

import onnx_ir as ir

from pass_exporter.derived.adapter_rows import adapter_pads
from pass_exporter.derived.embeddings import by_id
from pass_exporter.derived.group_query import DOMAIN
from pass_exporter.trunk.graph import take_place


def gate_adapter_results(graph: ir.Graph, vocab_size: int) -> None:
    """Replace Gather, MatMul, MatMul, Pad, Add by MatMul, MatMul, GatedAdd in adapted layers."""
    pads = adapter_pads(graph)
    if not pads:
        return
    gate = by_id(graph, "adapter.gate", 0, 1, vocab_size)
    graph.insert_before(graph[0], gate)
    for pad in pads:
        gather, nodes = _from_gather(pad)
        if any(node.op_type == "DequantizeLinear" for node in nodes):
            continue
        rows = gather.inputs[0]
        assert rows is not None
        gather.outputs[0].replace_all_uses_with(rows)
        for node in nodes:
            node.outputs[0].shape = None  # it had the number of look-ahead rows
        (use,) = pad.outputs[0].uses()
        add = use.node
        gated = ir.node(
            "GatedAdd", [add.inputs[1 - use.idx], pad.inputs[0], gate.outputs[0]], domain=DOMAIN
        )
        graph.insert_before(add, gated)
        take_place(add.outputs[0], gated.outputs[0])
        graph.remove([add, pad, gather], safe=True)
    graph.opset_imports[DOMAIN] = 1


def _from_gather(pad: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """Return the Gather of the rows whose products `pad` pads, and the nodes after it, last
    first."""
    nodes: list[ir.Node] = []
    value = pad.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Gather":
            return node, nodes
        nodes.append(node)
        value = node.inputs[0]
    raise AssertionError("the adapter's products do not begin with a Gather")
