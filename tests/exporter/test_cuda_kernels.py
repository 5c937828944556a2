"""Graphs that a CUDA session loads can be captured as CUDA graphs: every node has a kernel, and no
value is copied between the host and the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cuda_kernels import copied_values, missing_kernels

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.read import read_manifest

FORMATS = ("int4", "int8", "fp16")
BUNDLES = ("tiny", "adapter", "head", "subset", "rejection", *FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_all_graphs_of_a_bundle_can_be_captured(name, request, in_format):
    in_floats = name not in FORMATS
    bundle = request.getfixturevalue(f"{name}_bundle") if in_floats else in_format(name)
    derived = read_manifest(bundle).derived
    for_cpu = {bundle / trunk.file for trunk in derived if trunk.device == "cpu"}
    files = sorted(set(bundle.glob("*.onnx")) - for_cpu)
    assert len(files) > 10
    assert [line for file in files for line in copied_values(file)] == []
    if in_floats:
        assert [line for file in files for line in missing_kernels(file)] == []


def save(op: GraphTape, value: Any, dtype: Any, path: Path) -> Path:
    ir.save(op.model({"y": (value, dtype, ["m"])}), path)
    return path


@pytest.mark.parametrize(
    ("operator", "dtype", "attributes", "fault", "copied"),
    [
        ("ArgMax", np.int64, {"axis": 0}, "no CUDA kernel for T = int64", False),
        ("ArgMax", np.float32, {"axis": 0}, None, False),
        ("Elu", np.float32, {}, "has CUDA kernels of version 6+ only", True),
        ("Det", np.float32, {}, "has no CUDA kernel of any type", True),
    ],
)
def test_a_node_without_a_kernel_is_found(tmp_path, operator, dtype, attributes, fault, copied):
    op = GraphTape("one")
    x = op(
        "Cast", op.input("x", np.float16, ["n"]), to=int(ir.DataType.from_numpy(np.dtype(dtype)))
    )
    file = save(op, op(operator, x, **attributes), dtype, tmp_path / "one.onnx")
    lines = missing_kernels(file)
    assert lines == [] if fault is None else fault in lines[0]
    assert [operator in line for line in copied_values(file)] == [True] * copied


def compared_with_a_tensor(op: GraphTape, x: Any) -> Any:
    last = op("Sub", op("Shape", x), op.const([1]))
    return op("Cast", op("Less", x, last), to=int(ir.DataType.INT64))


def in_arithmetic_with(numbers: int) -> Any:
    def build(op: GraphTape, x: Any) -> Any:
        size = op("Sub", op("Shape", x), op.const([1]))
        picked = op("Gather", op.const(np.arange(numbers)), size, axis=0)
        return op("Expand", op.const([0]), picked)

    return build


def shapes_alone(op: GraphTape, x: Any) -> Any:
    return op("Expand", op("ReduceSum", x, op.const([0]), keepdims=1), op("Shape", x))


@pytest.mark.parametrize(
    ("use", "faults"),
    [
        (compared_with_a_tensor, ["Less"]),
        (in_arithmetic_with(100), []),
        (in_arithmetic_with(101), ["Gather"]),
        (shapes_alone, []),
    ],
)
def test_the_use_of_a_size_is_found(tmp_path: Path, use: Any, faults: list[str]):
    op = GraphTape("sizes")
    y = use(op, op.input("x", np.int64, ["n"]))
    lines = copied_values(save(op, y, np.int64, tmp_path / "sizes.onnx"))
    assert [line.split()[1] for line in lines] == faults
