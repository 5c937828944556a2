"""Quantized weights: errors of rounding, the graph and manifest of a quantized bundle, options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from export_process import command, error_line
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from trunk_graphs import count, optimized_graph

from conftest import export_bundle, make_model
from pass_exporter.cli import _default_dtype
from pass_exporter.config import EngineConfig, ExportConfig
from pass_exporter.engines.target import check_formats
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import resolve
from pass_exporter.quantize.rounding import round_to
from pass_exporter.quantize.spec import (
    FP8,
    INT4,
    INT8,
    MAX_SIGNED_CODE,
    MAX_UNSIGNED_CODE,
    SPECS,
    WeightScheme,
)
from pass_exporter.quantize.weights import QuantizedModel, quantize_model
from pass_runtime import PassError, read_manifest

BY_OUTPUT = WeightScheme("int8", block_size=None)
ASYMMETRIC4 = SPECS["int4"].with_zero_points().scheme
ASYMMETRIC8 = SPECS["int8"].with_zero_points().scheme
assert ASYMMETRIC4 is not None and ASYMMETRIC8 is not None
SCHEMES = {
    "int8": INT8,
    "int4": INT4,
    "int8 by output": BY_OUTPUT,
    "uint4": ASYMMETRIC4,
    "uint8": ASYMMETRIC8,
}


def make_weight(rng: torch.Generator, outputs: int, inputs: int) -> torch.Tensor:
    """Return a weight [out,in] with outliers, whose first row is 0."""
    weight = torch.randn(outputs, inputs, generator=rng) ** 3
    weight[0] = 0
    return weight


@pytest.mark.parametrize("name", SCHEMES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_rounding_changes_a_weight_by_half_a_scale_at_most(name, data):
    """Except weights beyond the range of codes: scales are chosen that clip, if the sum of squared
    errors is smaller."""
    scheme, rng = SCHEMES[name], torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    blocks, outputs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    weight = make_weight(rng, outputs, blocks * 32) * 10.0 ** data.draw(st.integers(-6, 6))
    packed = round_to(scheme, weight)
    codes, restored = packed.codes(), packed.dequantized()
    blocks = 1 if scheme.block_size is None else blocks
    assert codes.shape == restored.shape == weight.shape
    assert packed.scales.shape == (outputs, blocks)
    largest = MAX_SIGNED_CODE[scheme.code_type]
    low, high = (
        (0, MAX_UNSIGNED_CODE[scheme.code_type]) if scheme.zero_points else (-largest - 1, largest)
    )
    assert codes.min() >= low and codes.max() <= high
    scales = packed.scales.repeat_interleave(weight.shape[1] // blocks, 1)
    inside = (codes > low) & (codes < high)
    assert ((restored - weight).abs()[inside] <= 0.5001 * scales[inside]).all()
    # Scales that cover the largest weights are the result without a search.
    no_search = WeightScheme(scheme.code_type, scheme.block_size, scheme.zero_points)
    covering = round_to(no_search, weight).dequantized()
    assert ((restored - weight) ** 2).sum() <= ((covering - weight) ** 2).sum() * 1.0001
    if not scheme.zero_points:
        assert ((covering - weight).abs() <= 0.5001 * weight.abs().amax() / largest).all()
    assert not restored[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [WeightScheme("int4"), INT8, BY_OUTPUT, FP8], ids=str)
def test_rounding_values_that_were_rounded_before_keeps_them(
    scheme: WeightScheme, dtype: torch.dtype
):
    packed = round_to(scheme, make_weight(torch.Generator().manual_seed(0), 5, 64).to(dtype))
    rounded = packed.dequantized()
    assert packed.scales.dtype == rounded.dtype == dtype
    twice = round_to(packed.scheme, rounded).dequantized()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    assert torch.allclose(twice.float(), rounded.float(), rtol=tolerance)


def test_zero_points_halve_the_error_of_positive_weights():
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    with_zero_points, symmetric = (
        (round_to(scheme, weight).dequantized() - weight).square().sum()
        for scheme in (ASYMMETRIC4, INT4)
    )
    assert with_zero_points < symmetric / 2


def test_the_rounding_of_a_row_does_not_depend_on_other_rows():
    """So large weights can be rounded in parts. This one is rounded in several."""
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    for scheme in (*SCHEMES.values(), FP8):
        whole, last = round_to(scheme, weight), round_to(scheme, weight[299:])
        assert torch.equal(whole.dequantized()[299:], last.dequantized())


@pytest.fixture(scope="module")
def int4_bundle(
    tiny_model: Path, adapter_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle in int4 without zero points."""
    output = tmp_path_factory.mktemp("bundles") / "int4"
    options = {"weights": "int4", "zero_points": False, "lookahead_weights": adapter_weights}
    return export_bundle(tiny_model, output, lookahead=3, **options)


@pytest.fixture(scope="module")
def uint4_bundle(in_format: Callable[[str], Path]) -> Path:
    """A bundle in int4 with zero points, which is the default; its codes are unsigned."""
    return in_format("int4")


def count_products(bundle: Path) -> dict[int, int]:
    """Return the number of products by the ONNX data type of their weights."""
    graph = onnx.load(bundle / "trunk.onnx", load_external_data=False).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    products = Counter[int]()
    for node in graph.node:
        if node.op_type == "MatMul":
            dequantize = makers.get(node.input[1])
            products[types[dequantize.input[0] if dequantize else node.input[1]]] += 1
    return products


def test_every_linear_layer_is_in_4_bits_and_qkv_and_the_adapter_in_int8(
    int4_bundle: Path, uint4_bundle: Path
):
    # Each of two layers has q+k+v in int8, and o, gate, up and down in 4 bits, as is the LM head.
    # The adapter has A of four linear layers in int8, and B, whose rank of 4 is too small, in full.
    int4, uint4, int8, full = (
        getattr(onnx.TensorProto, name) for name in ("INT4", "UINT4", "INT8", "FLOAT")
    )
    assert count_products(int4_bundle) == {int4: 9, int8: 6, full: 4}
    assert count_products(uint4_bundle) == {uint4: 9, int8: 6, full: 4}


def test_onnx_runtime_fuses_every_quantized_product(
    int4_bundle: Path, uint4_bundle: Path, tmp_path: Path
):
    for bundle in (int4_bundle, uint4_bundle):
        graph = optimized_graph(bundle / "trunk.onnx", tmp_path)
        assert count(graph, "MatMulNBits") == 15 and not count(graph, "DequantizeLinear")


def test_the_manifest_says_how_weights_are_quantized(
    int4_bundle: Path, uint4_bundle: Path, tiny_bundle: Path
):
    assert read_manifest(tiny_bundle).model.quantization is None
    for bundle, zero_points in ((int4_bundle, False), (uint4_bundle, True)):
        quantization = read_manifest(bundle).model.quantization
        assert quantization is not None and quantization.lm_head is not None
        assert quantization.calibration == "the model's own text"
        for grid in (quantization.grid, quantization.lm_head):
            assert (grid.numbers, grid.block_size, grid.zero_points) == ("int4", 32, zero_points)
    with pytest.raises(PassError, match="--no-zero-points"):
        check_formats(read_manifest(uint4_bundle), ["sm89"])


def test_zero_points_are_refused_for_fp8_and_for_engines(tiny_model: Path, tmp_path: Path):
    flags = ("--model", tiny_model, "--zero-points", "-o", tmp_path / "bundle")
    assert "--zero-points is for --weights int4 and int8" in error_line(
        command(*flags, "--weights", "fp8")
    )
    engines = ("--weights", "int4", "--engine", "tensorrt-rtx", "--compute-capability", "8.9")
    assert "TensorRT does not support zero points" in error_line(command(*flags, *engines))


def test_int4_has_zero_points_by_default_in_fp32_alone():
    """Bundles in other dtypes are for GPUs."""
    assert ExportConfig("model", weights="int4").spec.scheme == ASYMMETRIC4
    for options in ({"dtype": "fp16"}, {"dtype": "bf16"}, {"zero_points": False}):
        assert ExportConfig("model", weights="int4", **options).spec.scheme == INT4


def test_a_quantized_lm_head_leaves_the_embeddings_tied_to_it_as_they_are(tmp_path: Path):
    path = make_model(tmp_path / "tied", tie_word_embeddings=True)
    model = load_model(resolve(str(path)), "fp32").model
    before = model.get_input_embeddings().weight.clone()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    quantized = QuantizedModel(SPECS["int8"])
    quantize_model(model, None, quantized, lambda _done, _total: None)
    assert torch.equal(model.get_input_embeddings().weight, before)
    rounded = quantized.weights["model.lm_head.weight"].dequantized()
    assert torch.equal(model.lm_head.weight, rounded)


@pytest.mark.slow
def test_verify_reports_agreement_and_perplexity(tiny_model: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    flags = ("--model", tiny_model, "--lookahead", 1, "--verify", text)
    done = command(*flags, "-o", tmp_path / "bundle")
    assert done.returncode == 0, done.stderr
    assert "greedy agreement        100.0 % of tokens" in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("perplexity"))
    assert line.split()[1].rstrip(",") == line.split()[6]  # of the bundle, and of torch


@pytest.mark.slow
def test_int4_without_text_has_the_schemes_of_int4_with_text(
    tiny_model: Path, uint4_bundle: Path, tmp_path: Path
):
    options = {"weights": "int4", "calibrate": Path("none")}
    rounded = export_bundle(tiny_model, tmp_path / "rounded", **options)
    with_text, nearest = (read_manifest(b).model.quantization for b in (uint4_bundle, rounded))
    assert with_text is not None and nearest is not None
    assert (with_text.calibration, nearest.calibration) == ("the model's own text", None)
    assert nearest.layers == with_text.layers and nearest.lm_head == with_text.lm_head
    flags = ("--model", tiny_model, "-o", tmp_path / "w8a8", "--calibrate", "none")
    assert "w8a8 cannot do without text" in error_line(command(*flags, "--weights", "w8a8"))


@pytest.mark.parametrize("stored", ["fp16", "bf16", "fp32"])
def test_the_default_dtype_is_that_of_the_model_for_engines_and_else_fp32(
    tmp_path: Path, stored: str
):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[stored]
    AutoConfig.for_model("llama", dtype=dtype).save_pretrained(tmp_path)
    assert _default_dtype(str(tmp_path), None, EngineConfig("tensorrt-rtx")) == stored
    assert _default_dtype(str(tmp_path), None, None) == "fp32"
