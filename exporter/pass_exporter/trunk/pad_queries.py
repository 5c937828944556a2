"""Adds a spare query row to every Attention, so that windows of all widths agree bit for bit.

ONNX Runtime has other attention kernels for one query row than for several, and their results
differ by float32 rounding. If activations are rounded to 8 bits, later layers amplify this
difference, up to half a logit between a pass with one row and one with several. With a spare row no
Attention has a single row.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def pad_queries(graph: ir.Graph) -> None:
    """Repeat the last query row of every Attention, and drop the repeated row's result."""
    parts = {"last": -1, "end": np.iinfo(np.int64).max, "start": 0, "axis": 2}
    sizes = {
        name: initializer(graph, f"pad_queries.{name}", np.array([n], np.int64))
        for name, n in parts.items()
    }
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3]
        assert query is not None and mask is not None
        if mask not in masks:
            masks[mask] = _with_last_row(graph, node, mask, sizes)
        node.replace_input_with(0, _with_last_row(graph, node, query, sizes))
        node.replace_input_with(3, masks[mask])
        padded = node.outputs[0]
        kept = ir.node("Slice", [padded, sizes["start"], sizes["last"], sizes["axis"]])
        kept.outputs[0].shape, kept.outputs[0].type = padded.shape, padded.type
        padded.shape = None
        padded.replace_all_uses_with(kept.outputs[0])
        kept.replace_input_with(0, padded)
        graph.insert_after(node, kept)


def _with_last_row(
    graph: ir.Graph, before: ir.Node, value: ir.Value, sizes: dict[str, ir.Value]
) -> ir.Value:
    """[B,H,Q,...] -> [B,H,Q+1,...]: repeats the last row."""
    last = ir.node("Slice", [value, sizes["last"], sizes["end"], sizes["axis"]])
    both = ir.node("Concat", [value, last.outputs[0]], {"axis": 2})
    for node in (last, both):
        node.outputs[0].type = value.type
    graph.insert_before(before, [last, both])
    return both.outputs[0]
