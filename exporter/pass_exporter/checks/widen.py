"""A bf16 trunk as a float32 one with the same weights, for the exporter's checks: ONNX Runtime's CPU provider has no
bf16 kernels, and what is checked (masks, positions, weights, the cache) does not depend on the width of a number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import save
from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.metadata import METADATA, trunk_metadata

FILE = "trunk.check.onnx"


@contextmanager
def runnable(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """A manifest whose trunk ONNX Runtime can run on a CPU; for bf16 a float32 copy, which is removed again."""
    if manifest.model.dtype != "bfloat16":
        yield manifest
        return
    trunk, sizes = manifest.trunk, manifest.model.model_copy(update={"dtype": "float32"})
    graph = Graph(file=FILE, inputs=_wide(trunk.inputs), outputs=_wide(trunk.outputs))
    wide = manifest.model_copy(update={"trunk": graph, "model": sizes})
    model = ir.load(directory / manifest.trunk.file)
    widen(model)
    model.metadata_props[METADATA] = json.dumps(trunk_metadata(wide))
    try:
        save(model, directory / FILE)
        del model
        yield wide
    finally:
        for path in (directory / FILE, directory / f"{FILE}.data"):
            path.unlink(missing_ok=True)


def widen(model: ir.Model) -> None:
    """Every bf16 initializer, input, output and cast becomes float32."""
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.BFLOAT16:
            value.const_value = _widened(tensor)
    for node in model.graph:
        target = node.attributes.get("to")
        if node.op_type == "Cast" and target is not None and target.as_int() == int(ir.DataType.BFLOAT16):
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for output in node.outputs:
            if output.dtype == ir.DataType.BFLOAT16:
                output.dtype = ir.DataType.FLOAT


def _widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    def compute() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(np.float32))

    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(compute, dtype=ir.DataType.FLOAT, shape=shape, name=tensor.name or "")


def _wide(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(
        tensor.model_copy(update={"dtype": "float32"}) if tensor.dtype == "bfloat16" else tensor for tensor in tensors
    )
