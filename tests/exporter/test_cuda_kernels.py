"""Graphs that a CUDA session loads can be captured as CUDA graphs: every node has a kernel, and no
value is copied between the host and the device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from cuda_kernels import missing_kernels
from host_values import copied_values

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.read import read_manifest

FORMATS = ("int4", "int8", "fp16")
BUNDLES = ("tiny", "adapter", "head", "subset", "rejection", *FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLES)
def test_all_graphs_of_a_bundle_can_be_captured(
    name: str, request: pytest.FixtureRequest, in_format: Callable[[str], Path]
):
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
    ("operator", "dtype", "attributes", "fault"),
    [
        ("ArgMax", np.int64, {"axis": 0}, "no CUDA kernel for T = int64"),
        ("ArgMax", np.float32, {"axis": 0}, None),
        ("Elu", np.float32, {}, "has CUDA kernels of version 6+ only"),
        ("Det", np.float32, {}, "has no CUDA kernel of any type"),
    ],
)
def test_a_node_without_a_kernel_is_found(
    tmp_path: Path, operator: str, dtype, attributes, fault: str | None
):
    op = GraphTape("one")
    shape = op("Shape", op.input("x", np.float32, ["n", "n"]))
    x = op("Cast", shape, to=int(ir.DataType.from_numpy(np.dtype(dtype))))
    lines = missing_kernels(save(op, op(operator, x, **attributes), dtype, tmp_path / "one.onnx"))
    assert lines == [] if fault is None else fault in lines[0]


def test_a_size_that_is_compared_with_a_tensor_is_found(tmp_path: Path):
    op = GraphTape("mixed")
    x = op.input("x", np.int64, ["n"])
    last = op("Sub", op("Shape", x), op.const([1]))
    within = op("Cast", op("Less", x, last), to=int(ir.DataType.INT64))
    shaped = op("Expand", op("ReduceSum", x, op.const([0]), keepdims=1), op("Shape", x))
    model = op.model({"within": (within, np.int64, ["n"]), "shaped": (shaped, np.int64, ["n"])})
    ir.save(model, tmp_path / "mixed.onnx")
    (line,) = copied_values(tmp_path / "mixed.onnx")
    assert "Less" in line


@pytest.mark.parametrize(("numbers", "faults"), [(100, 0), (101, 1)])
def test_a_size_is_copied_for_arithmetic_with_a_long_constant(
    tmp_path: Path, numbers: int, faults: int
):
    op = GraphTape("long")
    size = op("Sub", op("Shape", op.input("x", np.int64, ["n"])), op.const([1]))
    picked = op("Gather", op.const(np.arange(numbers)), size, axis=0)
    path = save(op, op("Expand", op.const([0]), picked), np.int64, tmp_path / "long.onnx")
    assert len(copied_values(path)) == faults


def test_values_are_copied_for_an_operator_without_a_kernel(tmp_path: Path):
    op = GraphTape("elu")
    elu = op("Elu", op("Exp", op.input("x", np.float32, ["m"])))
    (line,) = copied_values(save(op, elu, np.float32, tmp_path / "elu.onnx"))
    assert "Elu" in line
