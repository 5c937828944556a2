"""Finds nodes for which ONNX Runtime's CUDA provider has no kernel: they run on the CPU, and their
graph is not captured. cuda_kernels.json is docs/OperatorKernels.md of ONNX Runtime, older than
`DEVICE_OPERATORS`, which have a kernel of opset 24."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from host_values import DEVICE_OPERATORS

TABLE = Path(__file__).with_suffix(".json")
OPSET = 24
OUTPUT_TYPED_BY = {"DequantizeLinear": 1}
"""Operators whose output has the type of the input at this index, if no attribute names the
type."""

UNDOCUMENTED = {
    name: {
        "versions": "1+",
        "inputs": "T T T",
        "outputs": "T",
        "types": {"T": "bfloat16 float float16"},
    }
    for name in ("GatedAdd", "GatedRMSNorm")
}
"""Operators of com.microsoft that the document lacks, with the types for which the CUDA library of
onnxruntime-gpu 1.31.1 has their kernels (`strings libonnxruntime_providers_cuda.so | grep
cuda8GatedAdd`)."""


def missing_kernels(file: Path) -> list[str]:
    """Return a line for every node of the graph that has no CUDA kernel."""
    model = ir.load(file)
    if model.opset_imports[""] != OPSET:
        return [f"{file.name}: opset {model.opset_imports['']}; DEVICE_OPERATORS is about {OPSET}"]
    kernels = json.loads(TABLE.read_text("utf-8"))["kernels"]
    kernels["com.microsoft"] |= UNDOCUMENTED
    types = {
        value: _name(value.dtype)
        for value in [*model.graph.inputs, *model.graph.initializers.values()]
    }
    faults = [(node, _fault(node, kernels, types)) for node in model.graph]
    return [
        f"{file.name}: {node.op_type} {node.name} {why}" for node, why in faults if why is not None
    ]


def _fault(node: ir.Node, kernels: dict[str, Any], types: dict[ir.Value, str]) -> str | None:
    kernel = kernels.get(node.domain, {}).get(node.op_type)
    if kernel is None:
        return "has no CUDA kernel of any type"
    if node.domain:
        inputs, outputs = kernel["inputs"].split(), kernel["outputs"].split()
        has_version = True  # operators of com.microsoft have one version
    else:
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        inputs, outputs = (
            [each.type_str for each in parameters] for parameters in (schema.inputs, schema.outputs)
        )
        has_version = (
            kernel["versions"] == f"{schema.since_version}+" or node.op_type in DEVICE_OPERATORS
        )
    type_of: dict[str, str] = {}  # by type variable
    for index, value in enumerate(node.inputs):
        if value is not None:  # the last input of a definition may be repeated
            type_of[inputs[min(index, len(inputs) - 1)]] = types[value]
    for index, value in enumerate(node.outputs):
        if not value.name:
            continue  # an optional output that the graph leaves out
        variable = outputs[min(index, len(outputs) - 1)]
        if variable not in type_of:
            type_of[variable] = _output_type(node, variable, types)
        types[value] = type_of[variable]
    if not has_version:
        return f"has CUDA kernels of version {kernel['versions']} only"
    for variable, name in type_of.items():
        supported = kernel["types"].get(variable, name)
        if name not in supported.split():
            return f"has no CUDA kernel for {variable} = {name}, only for {supported}"
    return None


def _output_type(node: ir.Node, variable: str, types: dict[ir.Value, str]) -> str:
    if (concrete := re.fullmatch(r"tensor\((\w+)\)", variable)) is not None:
        return concrete[1]
    for name in ("to", "output_dtype"):
        if name in node.attributes and node.attributes[name].as_int():
            return _name(ir.DataType(node.attributes[name].as_int()))
    if node.op_type in OUTPUT_TYPED_BY:
        return types[node.inputs[OUTPUT_TYPED_BY[node.op_type]]]
    if "value" in node.attributes:
        return _name(node.attributes["value"].as_tensor().dtype)
    # The definition allows one type alone, such as bool for a comparison.
    schema = onnx.defs.get_schema(node.op_type, OPSET)
    (allowed,) = next(
        c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == variable
    )
    return _output_type(node, allowed, types)


def _name(dtype: ir.DataType | None) -> str:
    assert dtype is not None
    return {"FLOAT": "float", "DOUBLE": "double"}.get(dtype.name, dtype.name.lower())
