"""Finds what keeps a graph from being captured as a CUDA graph: nodes for which ONNX Runtime's CUDA
provider has no kernel, so that they run on the CPU, and values that it copies between host and
device: sizes, and arithmetic with sizes alone, are on the host. cuda_kernels.json says which
kernels there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import onnx_ir as ir

SIZES = ("Shape", "Size")
SHAPED = "CumSum Expand ReduceMax ReduceMean ReduceMin ReduceSum Reshape Split Squeeze Tile TopK"
HOST_INPUTS = dict.fromkeys([*SHAPED.split(), "Trilu", "Unsqueeze"], (1,)) | {
    "ConstantOfShape": (0,),
    "GroupQueryAttention": (6,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Slice": (1, 2, 3, 4),
}
"""The inputs that CUDA kernels read on the host: their definitions have
InputMemoryType(OrtMemTypeCPUInput, ...)."""
ONNX_RUNTIMES_OPERATORS = frozenset(
    {"GatedAdd", "GatedRMSNorm", "GroupQueryAttention", "SkipSimplifiedLayerNormalization"}
)
"""Operators of com.microsoft in the trunks for CUDA. GroupQueryAttention's kernels are for 16-bit
numbers only."""
MAX_HOST_NUMBERS = 100
"""Arithmetic with sizes is computed on the host only if its constants have at most so many numbers
(`kSmallInitializerThreshold` in ONNX Runtime)."""
TABLE = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
OPSET, DEVICE_OPERATORS = 24, frozenset(TABLE["opset 24"])
"""A kernel for an earlier version of an operator does not run the later one: such a node goes to
the CPU, and its tensors are copied."""
OUTPUT_TYPED_BY = {"DequantizeLinear": 1}
"""Operators whose output has the type of the input at this index, if no attribute names the
type."""


def copied_values(file: Path) -> list[str]:
    """Return a line for every node that reads sizes and tensors of the device, or has no CUDA
    kernel, and for every output that is a size."""
    graph = ir.load(file).graph
    sizes: set[ir.Value] = set()  # values on the host
    faults = []
    for node in graph:
        kernels = DEVICE_OPERATORS if not node.domain else ONNX_RUNTIMES_OPERATORS
        if node.op_type not in kernels:
            faults.append(f"{file.name}: {node.op_type} {node.name} has no kernel on the device")
        if node.op_type in SIZES:
            sizes.update(node.outputs)
            continue
        host_inputs = HOST_INPUTS.get(node.op_type, ())
        device_inputs = [
            value
            for index, value in enumerate(node.inputs)
            if index not in host_inputs and value is not None and not _is_small_constant(value)
        ]
        sizes_read = [value for value in device_inputs if value in sizes]
        if not sizes_read:
            continue  # the results of the node are on the device
        if len(sizes_read) == len(device_inputs):
            sizes.update(node.outputs)  # arithmetic with sizes alone
        else:
            names = ", ".join(str(value.name) for value in sizes_read)
            faults.append(f"{file.name}: {node.op_type} {node.name} reads the size {names}")
    return faults + [
        f"{file.name}: the output {value.name} is a size"
        for value in graph.outputs
        if value in sizes
    ]


def _is_small_constant(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= MAX_HOST_NUMBERS


def missing_kernels(file: Path) -> list[str]:
    """Return a line for every node of the graph that has no CUDA kernel."""
    model = ir.load(file)
    if model.opset_imports[""] != OPSET:
        return [f"{file.name}: opset {model.opset_imports['']}; DEVICE_OPERATORS is about {OPSET}"]
    types = {
        value: _name(value.dtype)
        for value in [*model.graph.inputs, *model.graph.initializers.values()]
    }
    faults = [(node, _fault(node, types)) for node in model.graph]
    return [
        f"{file.name}: {node.op_type} {node.name} {why}" for node, why in faults if why is not None
    ]


def _fault(node: ir.Node, types: dict[ir.Value, str]) -> str | None:
    kernel = TABLE["kernels"].get(node.domain, {}).get(node.op_type)
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
