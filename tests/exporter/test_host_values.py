"""Graphs that a CUDA session loads have no value that would be copied between the host and the
device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from host_values import copied_values

from conftest import export_bundle, write_random_weights
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.read import read_manifest


def graphs(bundle: Path) -> list[Path]:
    """The graphs that are not for the CPU alone."""
    derived = {
        bundle / trunk.file for trunk in read_manifest(bundle).derived if trunk.device == "cpu"
    }
    return sorted(set(bundle.glob("*.onnx")) - derived)


@pytest.mark.parametrize(
    "bundle", ["tiny_bundle", "adapter_bundle", "head_bundle", "subset_bundle"]
)
def test_float_graphs(bundle: str, request: pytest.FixtureRequest):
    """With adapter and head, and with a head that reads some of the vocabulary."""
    found = graphs(request.getfixturevalue(bundle))
    assert len(found) > 10
    assert [line for file in found for line in copied_values(file)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"weights": "int4"}, {"weights": "w8a8"}, {"dtype": "fp16"}, {"rule": "rejection"}],
    ids=lambda options: "-".join(options.values()),
)
def test_other_formats(tiny_model: Path, tmp_path: Path, options: dict[str, str]):
    weights = write_random_weights(tiny_model, tmp_path / "lookahead.safetensors", 2, head_rank=8)
    bundle = export_bundle(
        tiny_model, tmp_path / "bundle", lookahead=2, lookahead_weights=weights, **options
    )
    assert [line for file in graphs(bundle) for line in copied_values(file)] == []


def test_a_size_that_is_compared_with_a_tensor_is_found(tmp_path: Path):
    """Through arithmetic with constants; a size that only shapes a tensor is none."""
    op = GraphTape("mixed")
    x = op.input("x", np.int64, ["n"])
    last = op("Sub", op("Shape", x), op.const([1]))
    within = op("Cast", op("Less", x, last), to=int(ir.DataType.INT64))
    shaped = op("Expand", op("ReduceSum", x, op.const([0]), keepdims=1), op("Shape", x))
    model = op.model({"within": (within, np.int64, ["n"]), "shaped": (shaped, np.int64, ["n"])})
    ir.save(model, tmp_path / "mixed.onnx")
    (line,) = copied_values(tmp_path / "mixed.onnx")
    assert "Less" in line


@pytest.mark.parametrize(("numbers", "found"), [(100, 0), (101, 1)])
def test_a_size_that_meets_a_long_constant_is_found(tmp_path: Path, numbers: int, found: int):
    """ONNX Runtime leaves arithmetic with sizes on the host where its constants are short."""
    op = GraphTape("long")
    x = op.input("x", np.int64, ["n"])
    picked = op(
        "Gather", op.const(np.arange(numbers)), op("Sub", op("Shape", x), op.const([1])), axis=0
    )
    shaped = op("Expand", op.const([0]), picked)
    ir.save(op.model({"shaped": (shaped, np.int64, ["m"])}), tmp_path / "long.onnx")
    assert len(copied_values(tmp_path / "long.onnx")) == found


def test_an_operator_without_a_kernel_is_found(tmp_path: Path):
    op = GraphTape("elu")
    x = op.input("x", np.float32, ["n"])
    ir.save(op.model({"y": (op("Elu", op("Exp", x)), np.float32, ["n"])}), tmp_path / "elu.onnx")
    (line,) = copied_values(tmp_path / "elu.onnx")
    assert "Elu" in line
