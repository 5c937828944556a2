"""Adds the adapter's results with GatedAdd, ONNX Runtime's own operator, in the trunks for CUDA.

The portable trunk gathers the look-ahead rows, multiplies them by the adapter's matrices A and B,
pads the product to the whole window and adds it: five nodes in every adapted layer. Here all rows
are multiplied, and GatedAdd adds to each row its product times the row's gate, 1 or 0: three nodes.
That is faster, because on a GPU every node costs a kernel launch and some more rows cost nothing.

A row's gate is 1 if its id selects a look-ahead embedding. (The row of a draft has such an id too
if there is no draft for it. No token that is emitted depends on that row.) To the other rows the
node adds 0 times a finite number, so they keep their values.

In a layer that rounds the look-ahead rows to 8 bits for the adapter, the five nodes stay: the three
would round all rows of the window a second time.
"""

from __future__ import annotations

import onnx_ir as ir

from pass_exporter.derived.adapter_rows import adapter_pads, gather_and_products
from pass_exporter.derived.embeddings import by_id
from pass_exporter.derived.residual_norms import DOMAIN
from pass_exporter.trunk.graph import take_place


def gate_adapter_results(graph: ir.Graph, vocab_size: int) -> None:
    """Replace Gather, MatMul, MatMul, Pad, Add by MatMul, MatMul, GatedAdd in adapted layers."""
    pads = adapter_pads(graph)
    if not pads:
        return
    gate = by_id(graph, "adapter.gate", 0, 1, vocab_size)
    graph.insert_before(graph[0], gate)
    for pad in pads:
        gather, products = gather_and_products(pad)
        if any(node.op_type == "DequantizeLinear" for node in products):
            continue
        rows = gather.inputs[0]
        assert rows is not None
        gather.outputs[0].replace_all_uses_with(rows)
        for node in products:
            node.outputs[0].shape = None  # It had the number of look-ahead rows.
        (use,) = pad.outputs[0].uses()
        add, layer_result = use.node, use.node.inputs[1 - use.idx]
        gated = ir.node("GatedAdd", [layer_result, pad.inputs[0], gate.outputs[0]], domain=DOMAIN)
        graph.insert_before(add, gated)
        take_place(add.outputs[0], gated.outputs[0])
        graph.remove([add, pad, gather], safe=True)
    graph.opset_imports[DOMAIN] = 1
