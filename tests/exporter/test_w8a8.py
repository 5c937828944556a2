"""w8a8: smoothing, calibration of static int8 activations, the graph, its checks, and texts."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from export_process import command, error_line
from onnx import numpy_helper

from conftest import SilentProgress, export_bundle, make_model, write_random_weights
from pass_exporter.checks.cases import torch_cases
from pass_exporter.checks.rounded import FILE_PREFIX, with_torch_codes
from pass_exporter.checks.verify import Limits, check_trunk
from pass_exporter.model.families import SUPPORTED_FAMILIES
from pass_exporter.model.load import LoadedModel, load_model
from pass_exporter.model.lookahead import LookaheadWeights, read_lookahead
from pass_exporter.model.registry import resolve
from pass_exporter.quantize import bf16
from pass_exporter.quantize.calibrate import (
    StaticScale,
    channel_maxima,
    round_activations,
    static_scales,
    too_costly,
)
from pass_exporter.quantize.points import QuantPoint, find_points
from pass_exporter.quantize.rounding import round_to
from pass_exporter.quantize.run import quantize
from pass_exporter.quantize.smooth import smooth
from pass_exporter.quantize.spec import INT8_BY_OUTPUT, SPECS
from pass_exporter.quantize.text import file_ids, own_ids
from pass_runtime import GenerateOptions, PassError, SamplingParams, read_manifest
from pass_runtime.cli.inspect_bundle import _rows, describe
from pass_runtime.measuring.lossless import run_tokens
from pass_runtime.options import LoadOptions
from pass_runtime.session import load_verified
from same_text import assert_same_text

ModelFiles = tuple[Path, Path]
"""The directory of a model, and the file of its look-ahead weights."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    """A tiny model of every family, and random look-ahead weights with an adapter for it."""
    root, files = tmp_path_factory.mktemp("families"), {}
    for family in SUPPORTED_FAMILIES:
        model = make_model(root / family, family)
        weights = write_random_weights(model, root / f"{family}.safetensors", lookahead=3)
        files[family] = (model, weights)
    return files


def load_tiny(files: ModelFiles, lookahead: int = 3) -> tuple[LoadedModel, LookaheadWeights]:
    loaded = load_model(resolve(str(files[0])), "fp32")
    return loaded, read_lookahead(files[1], lookahead, loaded.model)


def no_report(_done: int, _steps: int) -> None:
    pass


@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_smoothing_evens_out_maxima_and_changes_no_result(
    families, family, monkeypatch: pytest.MonkeyPatch
):
    """With and without an adapter. Every point has a layer before it that smoothing can divide, but
    those of OLMo2 that follow no norm."""
    monkeypatch.setattr(bf16, "CPU_FEATURES", ())  # maxima in bf16 would differ by its rounding
    loaded, lookahead_weights = load_tiny(families[family])
    model, random = loaded.model, torch.Generator().manual_seed(0)
    for name, norm in model.named_modules():
        if name.endswith("norm"):
            norm.weight.data += torch.randn(norm.weight.shape, generator=random) / 4
    before = torch_cases(model, lookahead_weights)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    points, ids = find_points(model), torch.arange(64)[None]
    assert len(points) == 8
    assert sum(point.producer is None for point in points) == (4 if family == "olmo2" else 0)
    maxima = channel_maxima(model, points, ids, no_report)
    expected = smooth(model, lookahead_weights.adapter, maxima, 0.5)
    assert not all(torch.equal(weight, weights[name]) for name, weight in model.named_parameters())
    for case, smoothed in zip(before, torch_cases(model, lookahead_weights), strict=True):
        assert np.abs(case.logits - smoothed.logits).max() <= 1e-4 * np.abs(case.logits).max()
    after = channel_maxima(model, points, ids, no_report)
    for point in points:
        assert torch.allclose(after[point], expected[point], rtol=1e-3, atol=1e-4), point
        # Query heads that share a value head have the same factors, so their maxima may spread.
        if point.producer is not None and point.kind != "attention_out":
            spread, spread_before = (
                each.std() / each.mean() for each in (after[point], maxima[point])
            )
            assert spread <= 1.01 * spread_before


@pytest.mark.slow
@pytest.mark.parametrize("family", SUPPORTED_FAMILIES)
def test_every_family_passes_the_exporters_check(families, family, tmp_path: Path):
    """The checks compare the graph with and without rounding with torch, and every plan with plain
    decoding."""
    model, weights = families[family]
    bundle = export_bundle(
        model, tmp_path / family, lookahead=2, weights="w8a8", lookahead_weights=weights
    )
    quantization = read_manifest(bundle).model.quantization
    assert quantization is not None and quantization.activations == "static_int8"
    assert quantization.calibration == "the model's own text"
    assert not list(bundle.glob(f"{FILE_PREFIX}*"))


@pytest.fixture(scope="module")
def w8a8_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("w8a8")


def test_products_that_read_the_same_tensor_share_a_quantize_and_a_dequantize_node(
    w8a8_bundle: Path,
):
    """Both nodes have a scale per tensor and the zero point 0, an initializer. Weights have a scale
    per output."""
    model = onnx.load(w8a8_bundle / "trunk.onnx")
    onnx.checker.check_model(str(w8a8_bundle / "trunk.onnx"))
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = {node.output[0]: node for node in model.graph.node}
    products = Counter[str]()  # by the dequantized rows that they read
    adapter_rows = set()  # those that the adapter's A read
    for node in model.graph.node:
        rows = nodes.get(node.input[0]) if node.op_type == "MatMul" else None
        if rows is None or rows.op_type != "DequantizeLinear":
            continue
        quantize, weight = nodes[rows.input[0]], nodes[node.input[1]]
        assert quantize.op_type == "QuantizeLinear"
        assert list(quantize.input[1:]) == list(rows.input[1:])
        zero = numpy_helper.to_array(values[rows.input[2]])
        assert zero.shape == () and zero.dtype == np.int8 and zero == 0
        assert numpy_helper.to_array(values[rows.input[1]]).shape == ()
        codes, scales = (numpy_helper.to_array(values[name]) for name in weight.input)
        assert codes.dtype == np.int8 and scales.shape == (codes.shape[1],)
        assert {attribute.name: attribute.i for attribute in weight.attribute} == {"axis": 1}
        products[rows.output[0]] += 1
        if "lora_A" in weight.input[0]:
            adapter_rows.add(rows.output[0])
    manifest = read_manifest(w8a8_bundle)
    assert manifest.model.quantization is not None
    weight_only = manifest.model.quantization.weight_only
    # q, k and v are one product, so gate and up alone are two products that share their rows.
    assert max(products.values()) == 2
    # Each of two layers has four points, of which some stay weight-only; the LM head has one more.
    # All layers that read a point are weight-only, or none: q is one of q, k and v.
    points = [name for name in weight_only if name[:-5].endswith(("q", "o", "gate", "down"))]
    assert len(products) - len(adapter_rows) == 8 - len(points) + 1
    without_codes = [name for name in weight_only if name.endswith(("o_proj", "down_proj"))]
    assert len(adapter_rows) == 2 * manifest.model.layers - len(without_codes) > 0
    assert sum(node.op_type == "QuantizeLinear" for node in model.graph.node) == len(products)


def test_inspect_lists_the_layers_that_are_weight_only(w8a8_bundle: Path):
    manifest = read_manifest(w8a8_bundle)
    rows = dict(_rows(describe(w8a8_bundle, manifest) | {"verified": False}))
    assert rows["  weights"] == "int8 per output channel; LM head int8 per output channel"
    assert rows["  activations"] == "int8, static, calibrated on the model's own text"
    assert manifest.model.quantization is not None
    for name in manifest.model.quantization.weight_only:
        assert name in rows["  weight-only"]


def test_round_activations_rounds_as_onnx_does():
    """The values include ties, halves of a scale, and values beyond the range of int8."""
    rng = np.random.default_rng(0)
    for scale in (0.03, 1.0):
        halves = np.arange(-140, 140) * scale / 2
        x = np.concatenate([rng.normal(0, 60 * scale, 4096), halves]).astype(np.float32)
        operands = [
            ir.Value(name="x", shape=ir.Shape([len(x)]), type=ir.TensorType(ir.DataType.FLOAT))
        ]
        for name, value in (("s", np.float32(scale)), ("z", np.int8(0))):
            constant = ir.Value(name=name, const_value=ir.tensor(value, name=name))
            operands.append(constant)
        quantize_node = ir.node("QuantizeLinear", operands)
        dequantize_node = ir.node("DequantizeLinear", [quantize_node.outputs[0], *operands[1:]])
        dequantize_node.outputs[0].name = "y"
        graph = ir.Graph(
            operands[:1],
            dequantize_node.outputs,
            nodes=[quantize_node, dequantize_node],
            initializers=operands[1:],
            opset_imports={"": 24},
        )
        model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
        (expected,) = ort.InferenceSession(model).run(None, {"x": x})
        rounded = round_activations(torch.from_numpy(x), float(np.float32(scale)))
        assert np.array_equal(rounded.numpy(), expected)


def test_calibration_gives_the_same_codes_and_scales_every_time(families):
    first, second = (
        quantize(*load_tiny(families["llama"]), SPECS["w8a8"], None, SilentProgress())
        for _ in range(2)
    )
    assert first.activations == second.activations and first.activations
    for name, weight in first.weights.items():
        assert torch.equal(weight.data, second.weights[name].data), name


def test_the_predicted_loss_is_within_a_factor_of_3_of_the_divergence(families):
    """The divergence is that of the model with rounded inputs and weights of every point from the
    model without rounding, on the calibration text."""
    loaded, _ = load_tiny(families["qwen3"])
    model, points = loaded.model, find_points(loaded.model)
    ids = own_ids(model, loaded.tokenizer, 128, no_report)
    maxima = channel_maxima(model, points, ids, no_report)
    scales = static_scales(model, maxima, INT8_BY_OUTPUT, ids, no_report)
    before, layers = model(input_ids=ids).logits.log_softmax(-1), dict(model.model.named_modules())
    for point, static in scales.items():
        for name in point.readers:
            layer = layers[name]
            layer.weight.data = round_to(INT8_BY_OUTPUT, layer.weight).dequantized()
            layer.forward = lambda x, layer=layer, s=static.scale: torch.nn.functional.linear(
                round_activations(x, s), layer.weight, layer.bias
            )
    after = model(input_ids=ids).logits.log_softmax(-1)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    predicted = sum(static.loss for static in scales.values())
    assert predicted / 3 < divergence < predicted * 3


def test_the_points_with_the_largest_losses_stay_weight_only():
    """So many that the losses of the others sum to the budget at most."""
    losses = (5, 1, 30, 2, 1, 1, 20, 1)  # 61 in all
    points = [QuantPoint("mlp_out", (f"layers.{i}.mlp.down_proj",), None) for i in range(8)]
    scales = {p: StaticScale(1.0, loss) for p, loss in zip(points, losses, strict=True)}
    assert too_costly(scales, 100) == []
    assert too_costly(scales, 61) == []
    assert too_costly(scales, 31) == [points[2]]
    assert too_costly(scales, 30) == [points[2], points[6]]
    assert set(too_costly(scales, 0)) == set(points)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.02, 4.0])
def test_the_check_finds_a_wrong_scale_of_one_layer(
    w8a8_bundle: Path, tiny_model: Path, adapter_weights: Path, tmp_path: Path, factor: float
):
    loaded, lookahead_weights = load_tiny((tiny_model, adapter_weights), 4)
    quantized = quantize(loaded, lookahead_weights, SPECS["w8a8"], None, SilentProgress())
    bundle = shutil.copytree(w8a8_bundle, tmp_path / "copy")  # the check writes files there
    with with_torch_codes(bundle, read_manifest(bundle)) as manifest:
        files = {file.name for file in bundle.iterdir()}
        assert {each.file for each in (manifest.trunk, *manifest.derived)} <= files
        cases = torch_cases(loaded.model, lookahead_weights, quantized)
        check_trunk(bundle, manifest, cases, Limits(1e-4, 0.01))
        wrong, layer = copy.copy(quantized), list(quantized.activations)[-2]
        wrong.activations = quantized.activations | {layer: quantized.activations[layer] * factor}
        cases = torch_cases(loaded.model, lookahead_weights, wrong)
        with pytest.raises(PassError, match=r"differs from torch by .*8-bit codes by"):
            check_trunk(bundle, manifest, cases, Limits(1.0, 0.01))
    assert not [file for file in bundle.iterdir() if file.name.startswith(FILE_PREFIX)]


@pytest.mark.parametrize("portable", [True, False], ids=["portable", "derived"])
@pytest.mark.parametrize("values", [(0.0, 0, 1.0), (0.9, 0, 1.0), (0.9, 40, 0.9)], ids=str)
def test_every_plan_writes_the_text_of_plain_decoding(
    w8a8_bundle: Path, values: tuple[float, int, float], portable: bool
):
    """With the trunk derived for CPUs, and with the portable one."""
    manifest = read_manifest(w8a8_bundle)
    assert manifest.derived
    if portable:
        manifest = manifest.model_copy(update={"derived": ()})
    session = load_verified(w8a8_bundle, manifest, LoadOptions("cpu"))
    prompt = session.encode("def add(a, b):\n    return a + b\ndef add(a")
    for seed in (0, 5):
        sampling = SamplingParams(*values, seed)
        plain = GenerateOptions(48, sampling, "ar", ignore_eos=True)
        text = run_tokens(session, prompt, plain).token_ids
        for plan in ("two-pass", "fused", "fused:2,1,0", "auto"):
            assert_same_text(session, prompt, replace(plain, plan=plan), text)


def test_a_file_is_cut_into_sequences_for_calibration(tiny_model: Path):
    text = "The quick brown fox jumps over the lazy dog. " * 1000
    tokenizer = load_model(resolve(str(tiny_model)), "fp32").tokenizer
    assert file_ids(tokenizer, text).shape == (24, 256)


@pytest.mark.parametrize(
    ("file", "weights", "error"),
    [
        ("short.txt", "w8a8", "at least 512"),
        ("short.txt", "int4", "give one of at least 512"),
        ("empty.txt", "w8a8", "--calibrate needs text"),
        ("none.txt", "w8a8", "No such file"),
        ("short.txt", "full", "--calibrate is for --weights int4 and w8a8"),
        ("short.txt", "int8", "--calibrate is for --weights int4 and w8a8"),
    ],
)
def test_unusable_text_for_calibration_is_refused(
    tiny_model: Path, tmp_path: Path, file: str, weights: str, error: str
):
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "empty.txt").write_text("\n")
    flags = ("--model", tiny_model, "--weights", weights, "-o", tmp_path / "bundle", "--calibrate")
    assert error in error_line(command(*flags, tmp_path / file))
    assert not (tmp_path / "bundle").exists()
