"""Widens a bf16 trunk to float32 for the checks of an export, because ONNX Runtime's CPU provider
has no bf16 kernels. The nodes and the weights' values stay, so masks, positions, weights and cache
are checked all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import save
from pass_runtime.bundle.manifest import Graph, Manifest, Tensor
from pass_runtime.bundle.read import METADATA_KEY, trunk_metadata

RUNNABLE_FILE = "trunk.check.onnx"


@contextmanager
def runnable_on_cpu(directory: Path, manifest: Manifest) -> Iterator[Manifest]:
    """Yield a manifest whose trunk ONNX Runtime can run on a CPU: `manifest` itself, or that of a
    widened trunk, whose files are removed after the block."""
    if manifest.model.dtype != "bfloat16":
        yield manifest
        return
    trunk = manifest.trunk.model_copy(
        update={"file": RUNNABLE_FILE, **_widened_tensors(manifest.trunk)}
    )
    info = manifest.model.model_copy(update={"dtype": "float32"})
    runnable = manifest.model_copy(update={"trunk": trunk, "model": info})
    model = ir.load(directory / manifest.trunk.file)
    try:
        _widen(model)
        model.metadata_props[METADATA_KEY] = json.dumps(trunk_metadata(runnable))
        save(model, directory / RUNNABLE_FILE)
        del model  # so that the checks have its memory
        yield runnable
    finally:
        for path in (directory / RUNNABLE_FILE, directory / f"{RUNNABLE_FILE}.data"):
            path.unlink(missing_ok=True)


def _widen(model: ir.Model) -> None:
    """Change every bf16 initializer, input, output and cast to float32."""
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        if value.dtype == ir.DataType.BFLOAT16:
            value.dtype = ir.DataType.FLOAT
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.dtype == ir.DataType.BFLOAT16:
            value.const_value = _widened(tensor)
    for node in model.graph:
        target = node.attributes.get("to")
        if (
            node.op_type == "Cast"
            and target is not None
            and target.as_int() == int(ir.DataType.BFLOAT16)
        ):
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for output in node.outputs:
            if output.dtype == ir.DataType.BFLOAT16:
                output.dtype = ir.DataType.FLOAT


def _widened(tensor: ir.TensorProtocol) -> ir.LazyTensor:
    """Return a tensor that is widened when it is saved, so that one at a time is in memory."""

    def compute() -> ir.TensorProtocol:
        return ir.tensor(tensor.numpy().astype(np.float32))

    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(compute, dtype=ir.DataType.FLOAT, shape=shape, name=tensor.name or "")


def _widened_tensors(trunk: Graph) -> dict[str, tuple[Tensor, ...]]:
    """Return the manifest's `inputs` and `outputs` of the trunk with float32 in place of bf16."""
    return {
        part: tuple(
            tensor.model_copy(update={"dtype": "float32"}) if tensor.dtype == "bfloat16" else tensor
            for tensor in getattr(trunk, part)
        )
        for part in ("inputs", "outputs")
    }
