"""Finds nodes for which ONNX Runtime's CUDA provider has no kernel, by operator, version and types.

A node without a kernel runs on the CPU, its tensors are copied, and the graph is not captured. The
table cuda_kernels.json has the versions and types of kernels from ONNX Runtime's
docs/OperatorKernels.md. That document is older than the first release of the `gpu` extra, and lacks
kernels of later versions. `DEVICE_OPERATORS` have a kernel of opset 24 in that release: for them,
the newest types of the document count, whatever their version. To renew the table:

    cd tests/exporter; python cuda_kernels.py COMMIT < OperatorKernels.md > cuda_kernels.json

It has the newest kernel of each operator.
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
SCALED = {"DequantizeLinear": 1}
"""Operators whose output has the type of the input at this index, if no attribute names it."""

NEWER = {
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
    known = json.loads(TABLE.read_text("utf-8"))["kernels"]
    known["com.microsoft"] |= NEWER
    types = {
        value: _name(value.dtype)
        for value in [*model.graph.inputs, *model.graph.initializers.values()]
    }
    faults = [(node, _fault(node, known, types)) for node in model.graph]
    return [
        f"{file.name}: {node.op_type} {node.name} {why}" for node, why in faults if why is not None
    ]


def _fault(node: ir.Node, known: dict[str, Any], types: dict[ir.Value, str]) -> str | None:
    """Return why `node` has no kernel, or None. Add the types of its outputs to `types`."""
    listed = known.get(node.domain, {}).get(node.op_type)
    if listed is None:
        return "has no CUDA kernel of any type"
    if node.domain:
        inputs, outputs = listed["inputs"].split(), listed["outputs"].split()
        newest = True  # operators of com.microsoft have one version
    else:
        schema = onnx.defs.get_schema(node.op_type, OPSET)
        inputs, outputs = (
            [formal.type_str for formal in formals] for formals in (schema.inputs, schema.outputs)
        )
        newest = (
            listed["versions"] == f"{schema.since_version}+" or node.op_type in DEVICE_OPERATORS
        )
    bound: dict[str, str] = {}
    for at, value in enumerate(node.inputs):
        if value is not None:
            bound[inputs[min(at, len(inputs) - 1)]] = types[value]  # the last input may be repeated
    for at, value in enumerate(node.outputs):
        if not value.name:
            continue  # an optional output that the graph leaves out
        formal = outputs[min(at, len(outputs) - 1)]
        types[value] = bound[formal] = bound.get(formal) or _output_type(node, formal, types)
    if not newest:
        return f"has CUDA kernels of version {listed['versions']} only"
    for formal, found in bound.items():
        if found not in listed["types"].get(formal, found).split():
            return f"has no CUDA kernel for {formal} = {found}, only for {listed['types'][formal]}"
    return None


def _output_type(node: ir.Node, formal: str, types: dict[ir.Value, str]) -> str:
    """Return the type of an output that no input determines."""
    if (concrete := re.fullmatch(r"tensor\((\w+)\)", formal)) is not None:
        return concrete[1]
    for name in ("to", "output_dtype"):
        if name in node.attributes and node.attributes[name].as_int():
            return _name(ir.DataType(node.attributes[name].as_int()))
    if node.op_type in SCALED:
        return types[node.inputs[SCALED[node.op_type]]]
    if "value" in node.attributes:
        return _name(node.attributes["value"].as_tensor().dtype)
    schema = onnx.defs.get_schema(node.op_type, OPSET)  # as the bool of a comparison
    (only,) = next(
        c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == formal
    )
    return _output_type(node, only, types)


def _name(dtype: ir.DataType | None) -> str:
    """Return the name of a type in the document."""
    assert dtype is not None
    return {"FLOAT": "float", "DOUBLE": "double"}.get(dtype.name, dtype.name.lower())


def rows(document: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (domain, operator, entry) for the newest CUDA kernel of each operator."""
    section = document.split("## Operators implemented by CUDAExecutionProvider")[1].split(
        "\n## ", maxsplit=1
    )[0]
    domain = ""
    for line in section.splitlines():
        if (found := re.match(r"\|\*\*Operator Domain:\*\* \*([\w.]+)\*", line)) is not None:
            domain = "" if found[1] == "ai.onnx" else found[1]
        cells = line.split("|")[1:-1]
        if len(cells) != 4 or not re.fullmatch(r"\w+", cells[0]) or "**" not in cells[3]:
            continue
        yield domain, cells[0], _entry(*cells[1:])


def _entry(parameters: str, versions: str, types: str) -> dict[str, Any]:
    newest = parameters.split("or<br>", maxsplit=1)[0]

    def formals(kind: str) -> str:
        names = re.findall(rf"\*{kind}\* [\w.]+:\*\*([\w()]+)\*\*", newest)
        return " ".join(name.removeprefix("tensor(").removesuffix(")") for name in names)

    by_formal = re.findall(r"\*\*(\w+)\*\* = ([^*]+?)(?=<br/>|$)", types)
    return {
        "versions": versions,
        "inputs": formals("in"),
        "outputs": formals("out"),
        "types": {
            formal: " ".join(re.findall(r"tensor\((\w+)\)", names)) for formal, names in by_formal
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
