"""Quantized weights: the errors of rounding, the weights of a quantized bundle, and the options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from export_process import command, error_line
from hypothesis import given, settings
from hypothesis import strategies as st
from trunk_graphs import count, optimized_graph

from conftest import export_bundle
from pass_exporter.config import ExportConfig
from pass_exporter.engines.target import check_formats
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
    """[out,in] with outliers; the first block is all zeros."""
    weight = torch.randn(outputs, inputs, generator=rng) ** 3
    weight[0] = 0
    return weight


@pytest.mark.parametrize("name", SCHEMES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_a_weight_moves_by_half_a_step_at_most(name, data):
    scheme, rng = SCHEMES[name], torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    blocks, outputs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    weight = make_weight(rng, outputs, blocks * 32) * 10.0 ** data.draw(st.integers(-6, 6))
    packed = round_to(scheme, weight)
    codes, restored = packed.codes(), packed.dequantized()
    count = 1 if scheme.block_size is None else blocks
    assert codes.shape == restored.shape == weight.shape and packed.scales.shape == (outputs, count)
    largest = MAX_SIGNED_CODE[scheme.code_type]
    low, high = (
        (0, MAX_UNSIGNED_CODE[scheme.code_type]) if scheme.zero_points else (-largest - 1, largest)
    )
    assert codes.min() >= low and codes.max() <= high
    steps = packed.scales.repeat_interleave(weight.shape[1] // count, 1)
    inside = (codes > low) & (codes < high)
    assert ((restored - weight).abs()[inside] <= 0.5001 * steps[inside]).all()
    covering = round_to(
        WeightScheme(scheme.code_type, scheme.block_size, scheme.zero_points), weight
    ).dequantized()
    assert ((restored - weight) ** 2).sum() <= ((covering - weight) ** 2).sum() * 1.0001, (
        "worse than without a search"
    )
    if not scheme.zero_points:
        assert ((covering - weight).abs() <= 0.5001 * weight.abs().amax() / largest).all()
    assert not restored[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [WeightScheme("int4"), INT8, BY_OUTPUT, FP8], ids=str)
def test_a_symmetric_scheme_keeps_its_own_values(scheme: WeightScheme, dtype: torch.dtype):
    packed = round_to(scheme, make_weight(torch.Generator().manual_seed(0), 5, 64).to(dtype))
    assert packed.scales.dtype == packed.dequantized().dtype == dtype
    again = round_to(packed.scheme, packed.dequantized()).dequantized()
    assert torch.allclose(
        again.float(), packed.dequantized().float(), rtol=2e-2 if dtype == torch.bfloat16 else 2e-3
    )


def test_zero_points_are_nearer_to_weights_that_are_not_symmetric():
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(0))
    errors = [
        (round_to(scheme, weight).dequantized() - weight).square().sum()
        for scheme in (ASYMMETRIC4, INT4)
    ]
    assert errors[0] < errors[1] / 2


def test_a_row_is_rounded_without_the_others():
    """So large weights can be rounded in parts."""
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    for scheme in (*SCHEMES.values(), FP8):
        whole, last = round_to(scheme, weight), round_to(scheme, weight[299:])
        assert torch.equal(whole.dequantized()[299:], last.dequantized())


@pytest.fixture(scope="module")
def int4_bundle(
    tiny_model: Path, adapter_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The export's own check has compared it with torch, quantized the same way."""
    output = tmp_path_factory.mktemp("bundles") / "int4"
    options = {"weights": "int4", "zero_points": False, "lookahead_weights": adapter_weights}
    return export_bundle(tiny_model, output, lookahead=3, **options)


@pytest.fixture(scope="module")
def free_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("int4")


def weight_kinds(bundle: Path) -> dict[int, int]:
    """Return the number of products by the ONNX data type of their weights."""
    graph = onnx.load(bundle / "trunk.onnx", load_external_data=False).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    by_output = {node.output[0]: node for node in graph.node}
    found: dict[int, int] = {}
    for node in graph.node:
        if node.op_type == "MatMul":
            weight = by_output.get(node.input[1])
            kind = kinds[weight.input[0]] if weight is not None else kinds[node.input[1]]
            found[kind] = found.get(kind, 0) + 1
    return found


def test_every_linear_layer_is_quantized_and_the_adapter_in_int8(
    int4_bundle: Path, free_bundle: Path
):
    # Two layers of q+k+v in int8, o, gate, up and down, and the LM head; A of four adapted layers
    # in int8 (their B is of rank 4 only).
    int4, uint4, int8, full = (
        getattr(onnx.TensorProto, name) for name in ("INT4", "UINT4", "INT8", "FLOAT")
    )
    assert weight_kinds(int4_bundle) == {int4: 9, int8: 6, full: 4}
    assert weight_kinds(free_bundle) == {uint4: 9, int8: 6, full: 4}


def test_onnx_runtime_fuses_every_quantized_product(
    int4_bundle: Path, free_bundle: Path, tmp_path: Path
):
    for bundle in (int4_bundle, free_bundle):
        graph = optimized_graph(bundle / "trunk.onnx", tmp_path)
        assert count(graph, "MatMulNBits") == 15 and not count(graph, "DequantizeLinear")


def test_manifest_says_how_weights_are_quantized(
    int4_bundle: Path, free_bundle: Path, tiny_bundle: Path
):
    assert read_manifest(tiny_bundle).model.quantization is None
    for bundle, zero_points in ((int4_bundle, False), (free_bundle, True)):
        found = read_manifest(bundle).model.quantization
        assert found is not None and found.lm_head is not None
        assert found.calibration == "the model's own text"
        for grid in (found.grid, found.lm_head):
            assert (grid.numbers, grid.block_size, grid.zero_points) == ("int4", 32, zero_points)
    with pytest.raises(PassError, match="--no-zero-points"):
        check_formats(read_manifest(free_bundle), ["sm89"])


def test_zero_points_are_refused_for_fp8_and_for_engines(tiny_model: Path, tmp_path: Path):
    flags = ("--model", tiny_model, "--zero-points", "-o", tmp_path / "bundle")
    assert "--zero-points is for --weights int4 and int8" in error_line(
        command(*flags, "--weights", "fp8")
    )
    engines = ("--weights", "int4", "--engine", "tensorrt-rtx", "--compute-capability", "8.9")
    assert "TensorRT does not support zero points" in error_line(command(*flags, *engines))


def test_int4_has_zero_points_where_cpus_run_it():
    assert ExportConfig("model", weights="int4").spec.scheme == ASYMMETRIC4
    for options in ({"dtype": "fp16"}, {"dtype": "bf16"}, {"zero_points": False}):
        assert ExportConfig("model", weights="int4", **options).spec.scheme == INT4


def test_tied_embeddings_are_not_quantized(tmp_path: Path):
    from conftest import make_model
    from pass_exporter.model.load import load_model
    from pass_exporter.model.registry import resolve
    from pass_exporter.quantize.weights import QuantizedModel, quantize_model

    model = load_model(
        resolve(str(make_model(tmp_path / "tied", tie_word_embeddings=True))), "fp32"
    ).model
    before = model.get_input_embeddings().weight.clone()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    quantized = QuantizedModel(SPECS["int8"])
    quantize_model(model, None, quantized, lambda _done, _total: None)
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert torch.equal(
        model.lm_head.weight, quantized.weights["model.lm_head.weight"].dequantized()
    )


@pytest.mark.slow
def test_verify_reports_quality(tiny_model: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    flags = ("--model", tiny_model, "--lookahead", 1, "--verify", text)
    done = command(*flags, "-o", tmp_path / "full")
    assert done.returncode == 0, done.stderr
    assert "greedy agreement        100.0 % of tokens" in done.stderr
    full = next(line for line in done.stderr.splitlines() if line.startswith("perplexity"))
    assert full.split()[1].rstrip(",") == full.split()[6]  # of the bundle, of torch


@pytest.mark.slow
def test_int4_without_text_has_the_schemes_of_int4_with_text(
    tiny_model: Path, free_bundle: Path, tmp_path: Path
):
    options = {"weights": "int4", "calibrate": Path("none")}
    rounded = export_bundle(tiny_model, tmp_path / "rounded", **options)
    with_text, nearest = (read_manifest(b).model.quantization for b in (free_bundle, rounded))
    assert with_text is not None and nearest is not None
    assert (with_text.calibration, nearest.calibration) == ("the model's own text", None)
    assert nearest.layers == with_text.layers and nearest.lm_head == with_text.lm_head
    flags = ("--model", tiny_model, "-o", tmp_path / "bundle", "--calibrate", "none")
    assert "w8a8 cannot do without text" in error_line(command(*flags, "--weights", "w8a8"))


@pytest.mark.parametrize("stored", ["fp16", "bf16", "fp32"])
def test_engines_are_in_the_dtype_of_the_model(tmp_path: Path, stored: str):
    import torch
    from transformers import AutoConfig

    from pass_exporter.cli import _default_dtype
    from pass_exporter.config import EngineConfig

    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[stored]
    AutoConfig.for_model("llama", dtype=dtype).save_pretrained(tmp_path)
    assert _default_dtype(str(tmp_path), None, EngineConfig("tensorrt-rtx")) == stored
    assert _default_dtype(str(tmp_path), None, None) == "fp32"
