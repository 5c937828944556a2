"""Quantized weights: errors of rounding, the graph and manifest of a quantized bundle, options."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import load_path
from export_process import command
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizing import quantize, unsigned_values
from transformers import AutoConfig
from trunk_graphs import count, optimized_graph

from conftest import export_bundle, make_model
from pass_exporter.checks.torch_cases import torch_cases
from pass_exporter.checks.trunks import Limits, check_trunks
from pass_exporter.cli import _default_dtype
from pass_exporter.config import EngineConfig, ExportConfig
from pass_exporter.engines.target import check_formats
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.lookahead import read_lookahead
from pass_exporter.quantize.rounding import fits, round_to
from pass_exporter.quantize.spec import (
    FP8,
    INT4,
    INT8,
    MAX_SIGNED_CODE,
    MAX_UNSIGNED_CODE,
    SPECS,
    WeightScheme,
)
from pass_exporter.quantize.weights import input_groups, layer_name, quantized_modules
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
    weight = torch.randn(outputs, inputs, generator=rng) ** 3
    weight[0] = 0
    return weight


@pytest.mark.parametrize("name", SCHEMES)
@settings(derandomize=True, deadline=None, max_examples=30)
@given(data=st.data())
def test_rounding_changes_a_weight_by_half_a_scale_at_most(name, data):
    """But for weights that are clipped for a smaller sum of squared errors."""
    scheme, rng = SCHEMES[name], torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    blocks, outputs = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    weight = make_weight(rng, outputs, blocks * 32) * 10.0 ** data.draw(st.integers(-2, 2))
    assert fits(scheme, weight)
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
        # Scales have 11 bits; rounded down, they do not quite cover the largest weight.
        assert ((covering - weight).abs() <= 0.57 * weight.abs().amax() / largest).all()
    assert not restored[0].any()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "int8 by output"])
@settings(derandomize=True, deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), exponent=st.integers(-12, 13))
def test_unsigned_codes_have_the_same_values(name, seed, exponent):
    rng = torch.Generator().manual_seed(seed)
    weight = make_weight(rng, 5, 96).clamp(-2, 2) * 2.0**exponent
    weight[1] = weight[1].abs() + 2.0**exponent
    scheme = SCHEMES[name]
    packed = round_to(scheme, weight)
    values = torch.from_numpy(unsigned_values(packed))
    difference = packed.scales.repeat_interleave(32, 1) / 10
    assert packed.unsigned()[1] <= (4 if packed.scheme.code_type == "int4" else 8)
    assert (values - packed.dequantized()).abs().le(difference * scheme.zero_points).all()


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "int8 by output"])
def test_weights_beyond_the_range_of_scales_are_not_rounded_or_clipped(name: str):
    """GPTQ may make a weight larger that fits."""
    scheme, weight = SCHEMES[name], torch.zeros(3, 64)
    weight[1, 40] = 1e5
    assert not fits(scheme, weight)
    values = unsigned_values(round_to(scheme, weight))
    assert values[1, 40] > 2e4
    weight[1, 40] = -float(values[1, 40])
    assert np.isfinite(unsigned_values(round_to(scheme, weight))).all()
    assert fits(scheme, weight.half()) and not fits(scheme, weight[:, :50])
    assert not fits(scheme, torch.full((1, 32), torch.nan))


def test_weights_below_the_range_of_scales_become_0():
    for scheme in SCHEMES.values():
        packed = round_to(scheme, torch.full((2, 32), 1e-8))
        if scheme.block_size is not None:
            assert not packed.dequantized().any() and not unsigned_values(packed).any()


def test_only_blocks_of_float32_weights_have_unsigned_codes():
    weight = torch.ones(2, 32)
    for packed in (
        round_to(BY_OUTPUT, weight),
        round_to(FP8, weight),
        round_to(INT8, weight.half()),
    ):
        with pytest.raises(ValueError, match="only blocks of float32"):
            packed.unsigned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", [WeightScheme("int4"), INT8, BY_OUTPUT, FP8], ids=str)
def test_rounding_values_that_were_rounded_before_keeps_them(scheme, dtype):
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
    weight = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    for scheme in (*SCHEMES.values(), FP8):
        whole, last = round_to(scheme, weight), round_to(scheme, weight[299:])
        assert torch.equal(whole.dequantized()[299:], last.dequantized())


@pytest.fixture(scope="module")
def int4_bundle(
    tiny_model: Path, adapter_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "int4"
    options = {"weights": "int4", "zero_points": False, "lookahead_weights": adapter_weights}
    return export_bundle(tiny_model, output, lookahead=3, **options)


@pytest.fixture(scope="module")
def uint4_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("int4")


def count_products(bundle: Path) -> dict[int, int]:
    graph = onnx.load(bundle / "trunk.onnx", load_external_data=False).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    products = Counter[int]()
    for node in graph.node:
        if node.op_type == "MatMul":
            dequantize = makers.get(node.input[1])
            products[types[dequantize.input[0] if dequantize else node.input[1]]] += 1
    return products


def test_every_linear_layer_is_in_4_bits_and_qkv_and_the_adapter_in_int8(int4_bundle, uint4_bundle):
    # Each of two layers has q+k+v in int8, and o, gate, up and down in 4 bits, as is the LM head.
    # The adapter has A of four linear layers in int8, and B, whose rank of 4 is too small, in full.
    int4, uint4, int8, full = (
        getattr(onnx.TensorProto, name) for name in ("INT4", "UINT4", "INT8", "FLOAT")
    )
    assert count_products(int4_bundle) == {int4: 9, int8: 6, full: 4}
    assert count_products(uint4_bundle) == {uint4: 9, int8: 6, full: 4}


def test_onnx_runtime_fuses_every_quantized_product(int4_bundle, uint4_bundle, tmp_path):
    for bundle in (int4_bundle, uint4_bundle):
        graph = optimized_graph(bundle / "trunk.onnx", tmp_path)
        assert count(graph, "MatMulNBits") == 15 and not count(graph, "DequantizeLinear")


def test_the_manifest_says_how_weights_are_quantized(int4_bundle, uint4_bundle, tiny_bundle):
    assert read_manifest(tiny_bundle).model.quantization is None
    for bundle, zero_points in ((int4_bundle, False), (uint4_bundle, True)):
        quantization = read_manifest(bundle).model.quantization
        assert quantization is not None and quantization.lm_head is not None
        assert quantization.calibration == "the model's own text"
        for grid in (quantization.grid, quantization.lm_head):
            assert (grid.numbers, grid.block_size, grid.zero_points) == ("int4", 32, zero_points)
    with pytest.raises(PassError, match="--no-zero-points"):
        check_formats(read_manifest(uint4_bundle), ["sm89"])


def test_the_trunk_for_cpus_is_checked_where_its_kernels_are(
    uint4_bundle: Path, tiny_model: Path, adapter_weights: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded, manifest = load_path(tiny_model), read_manifest(uint4_bundle)
    cases = torch_cases(loaded.model, read_lookahead(adapter_weights, 4, loaded.model))
    files = set(uint4_bundle.iterdir())
    for limits, name in ((Limits(1e-6, 9), r"trunk\.onnx"), (Limits(9, 1e-6), r"trunk\.cpu\.onnx")):
        with pytest.raises(PassError, match=f"{name} differs from torch by"):
            check_trunks(uint4_bundle, manifest, cases, limits)
    error, limit = check_trunks(uint4_bundle, manifest, cases, Limits(9, 8))
    assert 0 < error < limit
    cases[0].logits[0, 0, 0] = np.nan
    with pytest.raises(PassError, match=r"trunk\.onnx differs from torch by nan"):
        check_trunks(uint4_bundle, manifest, cases[:1], Limits(9, 9))
    monkeypatch.setenv("PASS_KERNELS", "off")
    assert check_trunks(uint4_bundle, manifest, cases[1:], Limits(9, 1e-6))[1] == 9
    cpu_alone = manifest.model_copy(
        update={"trunk": manifest.trunk.model_copy(update={"file": "missing.onnx"})}
    )
    with pytest.raises(PassError, match="cannot be checked without kernels"):
        check_trunks(uint4_bundle, cpu_alone, cases, Limits(9, 9))
    assert set(uint4_bundle.iterdir()) == files


def test_int4_has_zero_points_by_default_in_fp32_alone():
    assert ExportConfig("model", weights="int4").spec.scheme == ASYMMETRIC4
    for options in ({"dtype": "fp16"}, {"dtype": "bf16"}, {"zero_points": False}):
        assert ExportConfig("model", weights="int4", **options).spec.scheme == INT4


TIED = {
    # format, dtype: (type of the head's codes, whether embeddings have the values of the codes)
    ("int8", "fp32"): ("int8", True),
    ("int4", "fp32"): ("int8", True),
    ("int4", "fp16"): ("int4", False),
    ("int8", "bf16"): ("int8", False),
    ("fp8", "fp32"): ("fp8", False),
}


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.parametrize(("weights", "dtype"), TIED, ids=str)
def test_embeddings_of_a_tied_head_have_the_values_of_its_codes_in_fp32(tied_model, weights, dtype):
    before = load_path(tied_model, dtype).model
    assert before.lm_head.weight is before.get_input_embeddings().weight
    model, quantized = quantize(tied_model, weights, dtype=dtype)
    head = quantized.weights["model.lm_head.weight"]
    code_type, coded = TIED[weights, dtype]
    assert (head.scheme.code_type, quantized.table is head) == (code_type, coded)
    expected = head.dequantized() if coded else before.lm_head.weight
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert torch.equal(model.lm_head.weight, head.dequantized())


def test_embeddings_of_an_untied_head_stay_as_they_are(tiny_model: Path):
    before = load_path(tiny_model).model.get_input_embeddings().weight
    model, quantized = quantize(tiny_model, "int8")
    assert quantized.table is None
    assert torch.equal(model.get_input_embeddings().weight, before)


def test_a_layer_that_cannot_be_rounded_keeps_its_weight_and_that_of_its_group(tiny_model: Path):
    model = load_path(tiny_model).model
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = 1e5
    _, quantized = quantize(tiny_model, "int8", model=model)
    missing = set(quantized_modules(model)) - {layer_name(name) for name in quantized.weights}
    assert missing == {f"layers.1.self_attn.{part}_proj" for part in "qkv"}


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_layers_are_grouped_by_what_they_read(family: str, tmp_path: Path):
    model = load_path(make_model(tmp_path / family, family)).model
    inputs: dict[str, int] = {}  # the address of each layer's input
    handles = [
        layer.register_forward_pre_hook(
            lambda _, x, name=name: inputs.update({name: x[0].data_ptr()})
        )
        for name, layer in quantized_modules(model).items()
    ]
    model(input_ids=torch.arange(4)[None])
    for handle in handles:
        handle.remove()
    groups = input_groups(model)
    assert len(groups) == 8 and sum(map(len, groups)) == len(inputs) - 1  # without the LM head
    for group in groups:
        assert len({inputs[name] for name in group}) == 1


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


@pytest.mark.parametrize("stored", ["fp16", "bf16", "fp32"])
def test_the_default_dtype_is_that_of_the_model_for_engines_and_else_fp32(tmp_path, stored):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[stored]
    AutoConfig.for_model("llama", dtype=dtype).save_pretrained(tmp_path)
    assert _default_dtype(str(tmp_path), None, EngineConfig("tensorrt-rtx")) == stored
    assert _default_dtype(str(tmp_path), None, None) == "fp32"
