"""Finds the nodes with which the portable trunk applies the adapter to look-ahead rows."""

from __future__ import annotations

import onnx_ir as ir

from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS


def adapter_pads(graph: ir.Graph) -> list[ir.Node]:
    """Return the Pad nodes with which the portable trunk pads the adapter's products to whole
    windows: those whose padding depends on the number of look-ahead rows."""
    rows = next((value for value in graph.inputs if value.name == LOOKAHEAD_ROWS), None)
    pads = [node for node in graph if node.op_type == "Pad"]
    return [] if rows is None else [pad for pad in pads if _depends_on_shape(pad.inputs[1], rows)]


def gather_and_products(pad: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """Return the Gather of the look-ahead rows, and all nodes between it and `pad`."""
    products: list[ir.Node] = []
    value = pad.inputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Gather":
            return node, products
        products.append(node)
        value = node.inputs[0]
    raise AssertionError("the adapter's products do not begin with a Gather")


def _depends_on_shape(value: ir.Value | None, source: ir.Value) -> bool:
    """Whether `value` is computed from the shape of `source`."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    if node.op_type == "Shape":
        return source in node.inputs
    return any(_depends_on_shape(each, source) for each in node.inputs)
