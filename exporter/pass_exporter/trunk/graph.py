"""Cleans up a traced graph, merges its MatMuls, and saves graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes
from onnxscript.optimizer import fold_constants

OPSET = 24
"""Of every graph in a bundle."""
EXTERNAL_DATA_MIN_BYTES = 1024
"""Smaller tensors stay inside the .onnx file."""
WeightParts = dict[str, tuple[str, ...]]
"""By a weight's name [in,out] in the graph, the model's weights [out_i,in] that it joins,
transposed."""

_CLEANUP_PASSES = ir.passes.Sequential(
    passes.IdentityEliminationPass(),
    passes.RemoveUnusedNodesPass(),
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
    passes.DeduplicateInitializersPass(),
    passes.CommonSubexpressionEliminationPass(),
    passes.RemoveUnusedNodesPass(),
)


def clean(model: ir.Model, dimensions: Mapping[str, Sequence[str | int | None]]) -> WeightParts:
    """Fold constants, merge q, k and v, transpose weights for MatMul, and drop metadata.
    dimensions: symbolic sizes of inputs and outputs; None for a size as traced."""
    # Weights are transposed first: constant folding would replace Transposes of small weights by
    # unnamed constants.
    parts = _pretranspose_weights(model.graph)
    fold_constants(model, onnx_shape_inference=False)
    _CLEANUP_PASSES(model)
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.shape is not None
        names = dimensions[value.name or ""]
        value.shape = ir.Shape(
            [old if new is None else new for old, new in zip(value.shape, names, strict=True)]
        )
    _merge_attention_projections(model.graph, parts)
    _drop_metadata(model)
    return parts


def _pretranspose_weights(graph: ir.Graph) -> WeightParts:
    """Replace every Transpose of a weight by a weight that is transposed on saving. Tied embeddings
    keep it: the file holds one copy."""
    parts: WeightParts = {}
    for node in list(graph):
        if node.op_type != "Transpose" or node.inputs[0] is None:
            continue
        weight, output = node.inputs[0], node.outputs[0]
        if not weight.is_initializer() or len(weight.uses()) != 1 or weight.name is None:
            continue
        tensor, axes = weight.const_value, node.attributes["perm"].as_ints()
        assert tensor is not None
        name = f"{weight.name}.transposed"
        shape = [int(tensor.shape.numpy()[axis]) for axis in axes]

        def compute(
            tensor: ir.TensorProtocol = tensor, axes: Sequence[int] = axes
        ) -> ir.TensorProtocol:
            return ir.tensor(np.ascontiguousarray(tensor.numpy().transpose(axes)))

        transposed = lazy_initializer(graph, name, tensor.dtype, shape, compute)
        output.replace_all_uses_with(transposed)
        graph.remove(node, safe=True)
        graph.initializers.pop(weight.name)
        parts[name] = (weight.name,)
    return parts


def _merge_attention_projections(graph: ir.Graph, parts: WeightParts) -> None:
    """Replace three MatMuls of the same rows (q, k and v) by one and a Split."""
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if (
            weight is not None
            and weight.is_initializer()
            and len(weight.uses()) == 1
            and node.inputs[0] is not None
        ):
            readers.setdefault(node.inputs[0], []).append(node)
    for rows, nodes in readers.items():
        if len(nodes) == 3:
            weights = [str(operand(node, 1).name) for node in nodes]
            merged = _merge(graph, rows, nodes)
            parts[merged] = tuple(
                part for weight in weights for part in parts.pop(weight, (weight,))
            )


def _merge(graph: ir.Graph, rows: ir.Value, nodes: Sequence[ir.Node]) -> str:
    weights = [operand(node, 1) for node in nodes]
    tensors = [weight.const_value for weight in weights if weight.const_value is not None]
    widths = [int(tensor.shape.numpy()[1]) for tensor in tensors]
    name = "+".join(str(weight.name) for weight in weights)

    def compute() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], 1))

    shape = [int(tensors[0].shape.numpy()[0]), sum(widths)]
    for weight in weights:
        graph.initializers.pop(str(weight.name))
    merged = lazy_initializer(graph, name, tensors[0].dtype, shape, compute)
    sizes = initializer(graph, f"{name}.sizes", np.array(widths, np.int64))
    product = ir.node("MatMul", [rows, merged])
    split = ir.node("Split", [product.outputs[0], sizes], {"axis": -1}, num_outputs=len(nodes))
    graph.insert_before(nodes[0], [product, split])
    for node, part in zip(nodes, split.outputs, strict=True):
        take_place(node.outputs[0], part)
        graph.remove(node, safe=True)
    return name


def take_place(old: ir.Value, new: ir.Value) -> None:
    """Make all readers of `old` read `new`, which gets its shape and type, and its name if it is an
    output of the graph."""
    new.shape, new.type = old.shape, old.type
    if old.is_graph_output():
        new.name, old.name = old.name, None
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def producer(value: ir.Value | None) -> ir.Node:
    """Return the node that computes `value`, which must be there."""
    node = None if value is None else value.producer()
    assert node is not None
    return node


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input of a node, which must have it."""
    value = node.inputs[index]
    assert value is not None
    return value


def only_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node that reads `value`; None if it has another type or there are several."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return next((each for each in node.inputs if each is not value), None)


def constant(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """Return the values of a constant, or None."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    return next(value for value in graph.inputs if value.name == name)


def initializer(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """Return the initializer `name`, added with the values of `array` if the graph lacks it."""
    if name not in graph.initializers:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
        value.const_value = tensor
        graph.register_initializer(value)
    return graph.initializers[name]


def lazy_initializer(
    graph: ir.Graph,
    name: str,
    dtype: ir.DataType,
    shape: Sequence[int],
    compute: Callable[[], ir.TensorProtocol],
) -> ir.Value:
    """Return the initializer `name`, computed when it is saved; added if the graph lacks it."""
    if name not in graph.initializers:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        value.const_value = ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=name)
        graph.register_initializer(value)
    return graph.initializers[name]


def _drop_metadata(model: ir.Model) -> None:
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for output in node.outputs:
            output.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def move_weights(
    model: ir.Model, path: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the weights to `<path>.data`, which `model` and its clones read from then on."""

    def report(_: ir.TensorProtocol, info: ir.external_data.CallbackInfo) -> None:
        if progress is not None:
            progress(info.index + 1, info.total)

    ir.external_data.unload_from_model(
        model,
        path.parent,
        f"{path.name}.data",
        size_threshold_bytes=EXTERNAL_DATA_MIN_BYTES,
        callback=report,
        max_workers=1,  # one tensor in memory at a time
        alignment=4096,  # page-aligned, so that engines can map the file
        align_threshold=EXTERNAL_DATA_MIN_BYTES,
    )


def save(model: ir.Model, path: Path) -> None:
    """Move the weights to `<path>.data`, and write the graph to `path`."""
    move_weights(model, path)
    ir.save(model, path)
