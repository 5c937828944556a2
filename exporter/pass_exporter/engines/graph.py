"""Changes graphs for TensorRT: the KV capacity is static, and a pass reads the first columns only.

TensorRT needs a static capacity S of the KV cache, and attention over the unused part would waste
time. So the trunk gets an additional input, `columns` [s], of which only the size s is used:
attention and its mask read the cache's first s columns. Profiles with different s share one engine
and one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from pass_runtime.bundle.manifest import Tensor
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.tensors import COLUMNS, WINDOW_TENSORS


def trunk_for_tensorrt(path: Path, capacity: int) -> bytes:
    """Return trunk.onnx with S = `capacity` and the input `columns` [s] bool, without weights."""
    model = onnx.load(path, load_external_data=False)
    _fix_capacity(model.graph, capacity)
    _read_columns(model.graph)
    serialized: bytes = model.SerializeToString()
    return serialized


def widened(tensors: Sequence[Tensor], plan: Plan, least_width: int) -> tuple[Tensor, ...]:
    """Return the inputs or outputs of a tail of `plan`, its windows widened to `least_width`
    rows."""
    widths = {"input_ids": plan.width, "next_ids": plan.next.width}
    return tuple(
        tensor.model_copy(
            update={"shape": (tensor.shape[0], max(widths[tensor.name], least_width))}
        )
        if tensor.name in WINDOW_TENSORS and tensor.shape[1] == widths[tensor.name]
        else tensor
        for tensor in tensors
    )


def tail_for_tensorrt(path: Path, plan: Plan, least_width: int) -> bytes:
    """Return the tail of a plan with its windows widened to `least_width`.

    It reads the first rows of its window, and pads the next window.
    """
    model = onnx.load(path, load_external_data=False)
    graph, (window, next_window) = model.graph, WINDOW_TENSORS
    for value in graph.input:
        if value.name == window:
            _rename(graph, value.name, f"{value.name}.rows")
            bounds = [
                _integers(graph, f"{value.name}.{at}", [n])
                for at, n in enumerate((0, plan.width, 1))
            ]
            graph.node.insert(
                0, helper.make_node("Slice", [value.name, *bounds], [f"{value.name}.rows"])
            )
            value.type.tensor_type.shape.dim[1].dim_value = least_width
    for value in graph.output:
        if value.name == next_window:
            _rename(graph, value.name, f"{value.name}.rows")
            pads = _integers(graph, f"{value.name}.pads", [0, 0, 0, least_width - plan.next.width])
            graph.node.append(helper.make_node("Pad", [f"{value.name}.rows", pads], [value.name]))
            value.type.tensor_type.shape.dim[1].dim_value = least_width
    serialized: bytes = model.SerializeToString()
    return serialized


def _rename(graph: onnx.GraphProto, name: str, other: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for i, found in enumerate(names):
                if found == name:
                    names[i] = other


def _integers(graph: onnx.GraphProto, name: str, values: Sequence[int]) -> str:
    graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
    return name


def aliases(path: Path) -> dict[str, str]:
    """Return output -> input (present_key.i -> past_key.i, ...): TensorScatter works in place."""
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
    """Make attention read slices of the cache and of the mask.

    Computing the mask for s columns from the start would save its slice, but TensorRT-RTX 1.7 fails
    on that in fp16.
    """
    graph.input.append(helper.make_tensor_value_info(COLUMNS, TensorProto.BOOL, ["columns"]))
    for name, value in {"zero": 0, "cache_axis": 2, "mask_axis": 3}.items():
        graph.initializer.append(
            helper.make_tensor(f"{COLUMNS}.{name}", TensorProto.INT64, [1], [value])
        )
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
                    read = [whole, f"{COLUMNS}.zero", count, f"{COLUMNS}.{axis}"]
                    nodes.append(helper.make_node("Slice", read, [part], name=part))
                node.input[i] = part
        nodes.append(node)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
