"""Changes a bundle's graphs for TensorRT.

It needs a static KV capacity S, and attention over unused entries would waste time: so attention
reads the first s of S entries, where s is the size of one more input, `columns` [s]. Profiles with
different s share one cache. Tails get wider windows if the library needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from pass_runtime.bundle.manifest import Tensor
from pass_runtime.bundle.tensors import COLUMNS, WINDOW_TENSORS
from pass_runtime.bundle.window import Window


def trunk_for_tensorrt(path: Path, capacity: int) -> bytes:
    """Return trunk.onnx, serialized, with S = `capacity` and the input `columns` [s] bool."""
    model = onnx.load(path, load_external_data=False)
    _fix_capacity(model.graph, capacity)
    _read_columns(model.graph)
    serialized: bytes = model.SerializeToString()
    return serialized


def widened(tensors: Sequence[Tensor], window: Window, least_width: int) -> tuple[Tensor, ...]:
    """Return the inputs or outputs of a tail with windows of at least `least_width` rows. Symbolic
    widths (of fused tails) stay."""
    widths = {"input_ids": window.width, "next_ids": window.next.width}
    return tuple(
        tensor.model_copy(
            update={"shape": (tensor.shape[0], max(widths[tensor.name], least_width))}
        )
        if tensor.name in WINDOW_TENSORS and tensor.shape[1] == widths[tensor.name]
        else tensor
        for tensor in tensors
    )


def tail_for_tensorrt(path: Path, window: Window, least_width: int) -> bytes:
    """Return a tail, serialized, with windows widened to `least_width` rows: it reads the first
    rows of its window, and pads the next."""
    model = onnx.load(path, load_external_data=False)
    graph, (ids, next_ids) = model.graph, WINDOW_TENSORS
    for value in graph.input:
        if value.name == ids:
            _rename(graph, value.name, f"{value.name}.rows")
            start_end_axis = [
                _add_integers(graph, f"{value.name}.{i}", [n])
                for i, n in enumerate((0, window.width, 1))
            ]
            slice_ = helper.make_node(
                "Slice", [value.name, *start_end_axis], [f"{value.name}.rows"]
            )
            graph.node.insert(0, slice_)
            value.type.tensor_type.shape.dim[1].dim_value = least_width
    for value in graph.output:
        if value.name == next_ids:
            _rename(graph, value.name, f"{value.name}.rows")
            added_rows = least_width - window.next.width
            pads = _add_integers(graph, f"{value.name}.pads", [0, 0, 0, added_rows])
            graph.node.append(helper.make_node("Pad", [f"{value.name}.rows", pads], [value.name]))
            value.type.tensor_type.shape.dim[1].dim_value = least_width
    serialized: bytes = model.SerializeToString()
    return serialized


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                if name == old:
                    names[i] = new


def _add_integers(graph: onnx.GraphProto, name: str, values: Sequence[int]) -> str:
    graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
    return name


def aliases(path: Path) -> dict[str, str]:
    """Map each output that a TensorScatter makes to the input that it updates: present_key.i to
    past_key.i."""
    graph = onnx.load(path, load_external_data=False).graph
    outputs = {value.name for value in graph.output}
    scatters = (node for node in graph.node if node.op_type == "TensorScatter")
    return {node.output[0]: node.input[0] for node in scatters if node.output[0] in outputs}


def _fix_capacity(graph: onnx.GraphProto, capacity: int) -> None:
    for value in (*graph.input, *graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param == "capacity":
                dimension.ClearField("dim_param")
                dimension.dim_value = capacity


def _read_columns(graph: onnx.GraphProto) -> None:
    """Make every Attention read s columns of cache and mask by a Slice. TensorRT-RTX 1.7 fails in
    fp16 on a mask that is computed for s columns from the start."""
    graph.input.append(helper.make_tensor_value_info(COLUMNS, TensorProto.BOOL, ["columns"]))
    for name, value in {"zero": 0, "cache_axis": 2, "mask_axis": 3}.items():
        _add_integers(graph, f"{COLUMNS}.{name}", [value])
    count = f"{COLUMNS}.count"
    nodes = [helper.make_node("Shape", [COLUMNS], [count], name="columns_count")]
    sliced: set[str] = set()
    for node in graph.node:
        if node.op_type == "Attention":
            for i, axis in ((1, "cache_axis"), (2, "cache_axis"), (3, "mask_axis")):
                whole = node.input[i]
                part = f"{whole}.read"
                if part not in sliced:  # Layers share masks.
                    sliced.add(part)
                    slice_inputs = [whole, f"{COLUMNS}.zero", count, f"{COLUMNS}.{axis}"]
                    nodes.append(helper.make_node("Slice", slice_inputs, [part], name=part))
                node.input[i] = part
        nodes.append(node)
    # Copied before the deletion, which ends the nodes that the graph owns.
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
