"""Every node of a graph that a CUDA session loads has a kernel there, so that the graph is captured
as a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from cuda_kernels import missing_kernels, rows

from conftest import export_bundle, make_model, write_random_weights
from pass_exporter.config import Dtype
from pass_exporter.export import TRUNK_FILE
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.model.registry import resolve
from pass_exporter.tails.tape import GraphTape
from pass_exporter.trunk.graph import save
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.bundle.read import read_manifest

WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
OVERRIDES = {"gemma3_text": WINDOWS}
OFTEN_IN_FP32 = ("llama", "gemma3_text")


def missing(bundle: Path) -> list[str]:
    """Of all graphs that are not for the CPU alone."""
    for_cpu = {
        bundle / trunk.file for trunk in read_manifest(bundle).derived if trunk.device == "cpu"
    }
    files = sorted(set(bundle.glob("*.onnx")) - for_cpu)
    assert len(files) > 10
    return [line for file in files for line in missing_kernels(file)]


@pytest.mark.parametrize("name", ["tiny_bundle", "adapter_bundle", "head_bundle", "subset_bundle"])
def test_graphs_of_every_plan_and_sampler(name: str, request: pytest.FixtureRequest):
    """Chains and trees, processors and log-probabilities; with adapter, with head, and with
    candidates for drafts."""
    bundle = request.getfixturevalue(name)
    assert missing(bundle) == []
    assert any("tail.tree" in file.name for file in bundle.glob("*.onnx")) == (
        name == "subset_bundle"
    )


def test_rejection(tmp_path: Path, subset_bundle: Path):
    weights = subset_bundle.parent / "lookahead.safetensors"
    options = {"lookahead": 4, "lookahead_weights": weights, "rule": "rejection"}
    assert (
        missing(export_bundle(subset_bundle.parent / "model", tmp_path / "bundle", **options)) == []
    )


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(
            family,
            dtype,
            marks=[pytest.mark.seldom] * (dtype == "fp32" and family not in OFTEN_IN_FP32),
        )
        for family in SUPPORTED_FAMILIES
        for dtype in ("fp16", "fp32")
    ],
)
def test_trunks_of_every_family(tmp_path: Path, family: str, dtype: Dtype):
    """With an adapter. test_derived_cuda.py does the same for the trunks that are derived for
    CUDA."""
    directory = make_model(tmp_path / "model", family, **OVERRIDES.get(family, {}))
    weights = write_random_weights(directory, tmp_path / "lookahead.safetensors", 2)
    model = load_model(resolve(str(directory)), dtype).model
    trunk, _ = trace_trunk(model, read_lookahead(weights, 2, model))
    save(trunk, tmp_path / TRUNK_FILE)
    assert missing_kernels(tmp_path / TRUNK_FILE) == []


@pytest.mark.parametrize(
    ("operator", "dtype", "attributes", "found"),
    [
        ("ArgMax", np.int64, {"axis": 0}, "no CUDA kernel for T = int64"),
        ("ArgMax", np.float32, {"axis": 0}, None),
        ("Elu", np.float32, {}, "has CUDA kernels of version 6+ only"),
        ("Det", np.float32, {}, "has no CUDA kernel of any type"),
    ],
)
def test_a_node_without_a_kernel_is_found(
    tmp_path: Path, operator: str, dtype, attributes, found: str | None
):
    """The type of its input comes through nodes before it."""
    op = GraphTape("one")
    x = op(
        "Cast",
        op("Shape", op.input("x", np.float32, ["n", "n"])),
        to=int(ir.DataType.from_numpy(np.dtype(dtype))),
    )
    ir.save(op.model({"y": (op(operator, x, **attributes), dtype, ["m"])}), tmp_path / "one.onnx")
    lines = missing_kernels(tmp_path / "one.onnx")
    assert lines == [] if found is None else found in lines[0]


def test_the_table_is_read_from_the_document():
    document = """
## Operators implemented by CPUExecutionProvider
|**Operator Domain:** *ai.onnx*||||
|Abs|*in* X:**T**<br> *out* Y:**T**|13+|**T** = tensor(int64)|
## Operators implemented by CUDAExecutionProvider
| Op Name | Parameters | OpSet Version | Types Supported |
|---------|------------|---------------|-----------------|
|**Operator Domain:** *ai.onnx*||||
|ArgMax|*in* data:**T**<br> *out* reduced:**tensor(int64)**|13+|**T** = tensor(double), tensor(float)|
|||12|**T** = tensor(double)|
| |
|**Operator Domain:** *com.microsoft*||||
|Pick|*in* x:**T**<br> *in* i:**I**<br> *out* y:**T**|1+|**I** = tensor(int32), tensor(int8)<br/> **T** = tensor(int4)|

## Operators implemented by DmlExecutionProvider
"""
    argmax = {"versions": "13+", "inputs": "T", "outputs": "int64", "types": {"T": "double float"}}
    types = {"T": "int4", "I": "int32 int8"}
    pick = {"versions": "1+", "inputs": "T I", "outputs": "T", "types": types}
    assert list(rows(document)) == [("", "ArgMax", argmax), ("com.microsoft", "Pick", pick)]
