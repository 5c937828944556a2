"""Changes a bundle's graphs for TensorRT.

It needs a static KV capacity S, and attention over unused entries would waste time: so attention
reads the first s of S entries, where s is the size of one more input, `columns` [s]. Profiles with
different s share one cache. Tails get wider windows if the library needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, operand
from pass_runtime.bundle.tensors import COLUMNS, WINDOW_TENSORS
from pass_runtime.bundle.window import Window

CACHE_AXIS, MASK_AXIS = 2, 3


def trunk_for_tensorrt(path: Path, capacity: int) -> bytes:
    """Return trunk.onnx, serialized, with S = `capacity` and the input `columns` [s] bool."""
    model = ir.load(path)
    graph = model.graph
    for value in (*graph.inputs, *graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([capacity if size == "capacity" else size for size in value.shape])
    _read_columns(graph)
    return _serialized(model)


def tail_for_tensorrt(path: Path, window: Window, least_width: int) -> bytes:
    """Return a tail, serialized, with windows widened to `least_width` rows: it reads the first
    rows of its window, and pads the next."""
    if least_width <= min(window.width, window.next.width):
        return path.read_bytes()
    model = ir.load(path)
    graph, (ids, next_ids) = model.graph, WINDOW_TENSORS
    for value in graph.inputs:
        if value.name == ids and window.width < least_width:
            bounds = enumerate((0, window.width, 1))  # start, end, axis
            limits = [_integers(graph, f"{ids}.{i}", [n]) for i, n in bounds]
            rows = ir.node("Slice", [None, *limits])
            value.replace_all_uses_with(rows.outputs[0])
            rows.replace_input_with(0, value)
            graph.insert_before(graph[0], rows)
            value.shape = ir.Shape(["batch", least_width])
    for index, value in enumerate(graph.outputs):
        if value.name == next_ids and window.next.width < least_width:
            pads = _integers(graph, f"{next_ids}.pads", [0, 0, 0, least_width - window.next.width])
            pad = ir.node("Pad", [value, pads])
            graph.append(pad)
            graph.outputs[index] = padded = pad.outputs[0]
            padded.name, value.name = next_ids, f"{next_ids}.rows"
            padded.shape, padded.type = ir.Shape(["batch", least_width]), value.type
    return _serialized(model)


def aliases(path: Path) -> dict[str, str]:
    """Map each output that a TensorScatter makes to the input that it updates: present_key.i to
    past_key.i."""
    scatters = (node for node in ir.load(path).graph if node.op_type == "TensorScatter")
    return {
        str(scatter.outputs[0].name): str(operand(scatter, 0).name)
        for scatter in scatters
        if scatter.outputs[0].is_graph_output()
    }


def _read_columns(graph: ir.Graph) -> None:
    """Make every Attention read s columns of cache and mask by a Slice. TensorRT-RTX 1.7 fails in
    fp16 on a mask that is computed for s columns from the start."""
    columns = ir.val(COLUMNS, dtype=ir.DataType.BOOL, shape=["columns"])
    graph.inputs.append(columns)
    count, zero = ir.node("Shape", [columns]), _integers(graph, f"{COLUMNS}.zero", [0])
    graph.insert_before(graph[0], count)
    parts: dict[ir.Value, ir.Value] = {}  # Layers share masks.
    for node in [node for node in graph if node.op_type == "Attention"]:
        for index, axis in ((1, CACHE_AXIS), (2, CACHE_AXIS), (3, MASK_AXIS)):
            whole = operand(node, index)
            if whole not in parts:
                axes = _integers(graph, f"{COLUMNS}.axis{axis}", [axis])
                part = ir.node("Slice", [whole, zero, count.outputs[0], axes])
                graph.insert_before(node, part)
                parts[whole] = part.outputs[0]
            node.replace_input_with(index, parts[whole])


def _integers(graph: ir.Graph, name: str, values: Sequence[int]) -> ir.Value:
    return initializer(graph, name, np.array(values))


def _serialized(model: ir.Model) -> bytes:
    serialized: bytes = ir.to_proto(model).SerializeToString()
    return serialized
