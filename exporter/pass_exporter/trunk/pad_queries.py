"""Adds a spare query row to every Attention, so that windows of all widths give the same bits.

ONNX Runtime has one attention kernel for a single query row and another for several, and their
results differ by float32 rounding. If activations are rounded to 8 bits, later layers amplify this
difference, up to half a logit between a pass with one row and one with several. With a spare row no
Attention has a single row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def pad_queries(graph: ir.Graph) -> None:
    """Repeat the last query row of every Attention, and drop the repeated row's result."""
    # The bounds of Slices, and their axis: rows are axis 2.
    bounds = {"last": -1, "end": np.iinfo(np.int64).max, "start": 0, "axis": 2}
    constants = {
        name: initializer(graph, f"pad_queries.{name}", np.array([bound], np.int64))
        for name, bound in bounds.items()
    }
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3]
        assert query is not None and mask is not None
        if mask not in masks:
            masks[mask] = _repeat_last_row(graph, node, mask, constants)
        node.replace_input_with(0, _repeat_last_row(graph, node, query, constants))
        node.replace_input_with(3, masks[mask])
        padded = node.outputs[0]
        kept = ir.node("Slice", [padded, constants["start"], constants["last"], constants["axis"]])
        kept.outputs[0].shape, kept.outputs[0].type = padded.shape, padded.type
        padded.shape = None  # It has a row more than the traced shape says.
        padded.replace_all_uses_with(kept.outputs[0])
        kept.replace_input_with(0, padded)  # The line before replaced this input, too.
        graph.insert_after(node, kept)


def _repeat_last_row(
    graph: ir.Graph, reader: ir.Node, value: ir.Value, constants: dict[str, ir.Value]
) -> ir.Value:
    """Return `value` [B,H,Q,...] with its last row twice, [B,H,Q+1,...], for the node `reader`."""
    last = ir.node("Slice", [value, constants["last"], constants["end"], constants["axis"]])
    padded = ir.node("Concat", [value, last.outputs[0]], {"axis": 2})
    for node in (last, padded):
        node.outputs[0].type = value.type
    graph.insert_before(reader, [last, padded])
    return padded.outputs[0]
