"""What TensorRT is given to parse: a bundle's graph with a static cache, of which a pass reads only the first columns.

TensorRT wants the KV cache's capacity S static, and attention over unused capacity is wasted work. So the trunk gets
one more input, `columns` [s], of which only the length counts: attention and its mask see the cache's first s columns.
Profiles for several s then share one engine and one cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from pass_runtime.bundle.bindings import COLUMNS
from pass_runtime.bundle.manifest import Graph, Tensor
from pass_runtime.bundle.plan import Plan


def trunk_for_tensorrt(path: Path, capacity: int) -> bytes:
    """trunk.onnx with S = `capacity` and the input `columns` [s] bool, serialized without its external data."""
    model = onnx.load(path, load_external_data=False)
    _fix_capacity(model.graph, capacity)
    _read_columns(model.graph)
    serialized: bytes = model.SerializeToString()
    return serialized


def widened(graph: Graph, plan: Plan, least_width: int) -> tuple[Tensor, ...]:
    """The outputs of a tail of `plan` for engines whose windows have at least `least_width` rows."""
    width = max(plan.next.width, least_width)
    return tuple(
        tensor.model_copy(update={"shape": (tensor.shape[0], width)})
        if tensor.name == "next_ids" and tensor.shape[1] == plan.next.width
        else tensor
        for tensor in graph.outputs
    )


def tail_for_tensorrt(path: Path, outputs: Sequence[Tensor]) -> bytes:
    """A tail whose `next_ids` is padded with zeros to the shape in `outputs`: the next window, as it lies in memory."""
    model = onnx.load(path, load_external_data=False)
    graph, name = model.graph, "next_ids"
    wanted = next(tensor.shape[1] for tensor in outputs if tensor.name == name)
    value = next(value for value in graph.output if value.name == name)
    size = value.type.tensor_type.shape.dim[1]
    for node in graph.node:
        for i, output in enumerate(node.output):
            if output == name:
                node.output[i] = f"{name}.rows"
        for i, read in enumerate(node.input):
            if read == name:
                node.input[i] = f"{name}.rows"
    pads = helper.make_tensor(f"{name}.pads", TensorProto.INT64, [4], [0, 0, 0, int(wanted) - size.dim_value])
    graph.initializer.append(pads)
    graph.node.append(helper.make_node("Pad", [f"{name}.rows", pads.name], [name], name="pad_next_ids"))
    size.dim_value = int(wanted)
    serialized: bytes = model.SerializeToString()
    return serialized


def aliases(path: Path) -> dict[str, str]:
    """present_key.i -> past_key.i and so on: outputs of TensorScatter that are written over its first input."""
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
    """Attention sees slices of the cache and of the mask. (Building the mask for s columns in the first place, so that
    nothing is sliced off, made TensorRT-RTX 1.7 fail in fp16.)"""
    graph.input.append(helper.make_tensor_value_info(COLUMNS, TensorProto.BOOL, ["columns"]))
    for name, value in {"zero": 0, "cache_axis": 2, "mask_axis": 3}.items():
        graph.initializer.append(helper.make_tensor(f"{COLUMNS}.{name}", TensorProto.INT64, [1], [value]))
    count = f"{COLUMNS}.count"
    nodes = [helper.make_node("Shape", [COLUMNS], [count], name="columns_count")]
    sliced: set[str] = set()
    for node in graph.node:
        if node.op_type == "Attention":
            for i, axis in ((1, "cache_axis"), (2, "cache_axis"), (3, "mask_axis")):
                whole = node.input[i]
                part = f"{whole}.read"
                if part not in sliced:  # all layers share the mask
                    sliced.add(part)
                    read = [whole, f"{COLUMNS}.zero", count, f"{COLUMNS}.{axis}"]
                    nodes.append(helper.make_node("Slice", read, [part], name=part))
                node.input[i] = part
        nodes.append(node)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)
