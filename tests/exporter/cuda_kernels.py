"""Finds nodes for which ONNX Runtime's CUDA provider has no kernel, by operator, version and types.

A node without a kernel runs on the CPU, its tensors are copied, and the graph is not captured. The
table cuda_kernels.json has the newest kernel of each operator, its version and types, from ONNX
Runtime's docs/OperatorKernels.md. That document is older than the first onnxruntime-gpu of the
`gpu` extra, and lacks kernels of later versions. `DEVICE_OPERATORS` have a kernel of opset 24 in
that release: for them, the types in the table are used whatever its version is. To renew the table:

    cd tests/exporter; python cuda_kernels.py COMMIT < OperatorKernels.md > cuda_kernels.json

The definition of an operator names the types of its inputs and outputs, such as T or I: here, these
names are *type variables*.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from host_values import DEVICE_OPERATORS

TABLE = Path(__file__).with_suffix(".json")
SOURCE = "docs/OperatorKernels.md of github.com/microsoft/onnxruntime, CUDAExecutionProvider"
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
    """Return why `node` has no kernel, or None. Add the types of its outputs to `types`."""
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
    """Return the type of an output whose type variable no input has."""
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
    """Return the name that the document has for a type."""
    assert dtype is not None
    return {"FLOAT": "float", "DOUBLE": "double"}.get(dtype.name, dtype.name.lower())


def rows(document: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (domain, operator, entry of the table) for the newest CUDA kernel of each operator.

    document: the text of OperatorKernels.md. Rows of an operator's older kernels have no name.
    """
    section = document.split("## Operators implemented by CUDAExecutionProvider")[1].split(
        "\n## ", maxsplit=1
    )[0]
    domain = ""
    for line in section.splitlines():
        if (heading := re.match(r"\|\*\*Operator Domain:\*\* \*([\w.]+)\*", line)) is not None:
            domain = "" if heading[1] == "ai.onnx" else heading[1]
        cells = line.split("|")[1:-1]
        if len(cells) != 4 or not re.fullmatch(r"\w+", cells[0]) or "**" not in cells[3]:
            continue
        yield domain, cells[0], _entry(*cells[1:])


def _entry(parameters: str, versions: str, types: str) -> dict[str, Any]:
    """Return the entry of the table for the cells of a row."""
    newest = parameters.split("or<br>", maxsplit=1)[0]

    def variables(direction: str) -> str:
        names = re.findall(rf"\*{direction}\* [\w.]+:\*\*([\w()]+)\*\*", newest)
        return " ".join(name.removeprefix("tensor(").removesuffix(")") for name in names)

    types_by_variable = re.findall(r"\*\*(\w+)\*\* = ([^*]+?)(?=<br/>|$)", types)
    return {
        "versions": versions,
        "inputs": variables("in"),
        "outputs": variables("out"),
        "types": {
            variable: " ".join(re.findall(r"tensor\((\w+)\)", names))
            for variable, names in types_by_variable
        },
    }


def main() -> None:
    kernels: dict[str, dict[str, Any]] = {"": {}, "com.microsoft": {}}
    for domain, operator, entry in rows(sys.stdin.read()):
        if domain in kernels:
            kernels[domain][operator] = entry
    json.dump({"source": SOURCE, "commit": sys.argv[1], "kernels": kernels}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
