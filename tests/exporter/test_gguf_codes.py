"""int4 and int8 keep the codes of a .gguf file, which are read from its blocks."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import load_path, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from quantizing import quantize, unsigned_values
from transformers import AutoModelForCausalLM
from trunk_graphs import count, optimized_graph

from conftest import SMOLLM2, export_bundle, make_model
from pass_exporter.engines.target import check_formats
from pass_exporter.model.registry import resolve
from pass_exporter.quantize import run
from pass_exporter.quantize.gguf_codes import FORMATS, UINT4, GgufCodes, read_codes
from pass_exporter.quantize.rounding import round_to
from pass_exporter.quantize.spec import INT4, INT8, WeightScheme
from pass_exporter.quantize.weights import QuantizedModel, alike, weight_name
from pass_runtime import PassError, read_manifest

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
NOT_WRITTEN = ("Q4_K", "Q5_K", "IQ4_NL")
"""Types that the gguf package reads and does not write."""
BITS = {"Q4": 4, "Q5": 5, "Q8": 8}


def random_blocks(kind: str, shape: tuple[int, int], seed: int = 0, scale: float = 1.0) -> Any:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // block, size), np.uint8)
    numbers = 1 if kind.endswith("_0") else 2
    floats = rng.uniform(-0.1, 0.1, (len(blocks), numbers)) * scale
    blocks[:, : 2 * numbers] = floats.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def dequantized(kind: str, data: Any) -> Any:
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", FORMATS)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data())
def test_codes_have_the_values_of_the_file(kind: str, data):
    """Bit for bit; K-quants' scales and offsets are products, rounded to float16."""
    shape = (data.draw(st.integers(1, 9)), 256 * data.draw(st.integers(1, 4)))
    scale = 2.0 ** data.draw(st.integers(-6, 6))
    stored = random_blocks(kind, shape, data.draw(st.integers(0, 2**32)), scale)
    expected, kept = dequantized(kind, stored), read_codes(kind, stored, torch.float32)
    assert kept is not None
    values = kept.dequantized().numpy()
    if kind in EXACT:
        assert np.array_equal(values, expected)
    else:
        # Of a code times a scale, and of an offset.
        largest = 31 * 63 * 0.1 * scale + 63 * 0.1 * scale
        assert np.abs(values - expected).max() <= largest * 2**-11
    codes, bits, scales, offsets = kept.unsigned()
    assert np.array_equal(unsigned_values(kept), values)
    assert codes.shape == shape and scales.shape == offsets.shape == (shape[0], shape[1] // 32)
    assert bits == BITS[kind[:2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_codes_in_16_bits_have_nearly_the_values_of_the_file(kind: str, dtype: torch.dtype):
    stored = random_blocks(kind, (5, 256))
    kept, expected = read_codes(kind, stored, dtype), dequantized(kind, stored)
    assert kept is not None and kept.dequantized().dtype == kept.scales.dtype == dtype
    limit = 2**-7 if dtype == torch.bfloat16 else 2**-10
    error = np.abs(kept.dequantized().float().numpy() - expected).max()
    assert error <= limit * np.abs(expected).max()


@pytest.mark.parametrize(("kind", "scale"), [("Q8_0", 1e4), ("Q4_K", 1e5), ("Q5_K", 1e5)])
def test_codes_with_scales_beyond_float16_are_not_kept(kind: str, scale: float):
    assert read_codes(kind, random_blocks(kind, (3, 256), scale=scale), torch.float32) is None


SCHEMES = {
    "int4": lambda weight: round_to(INT4, weight),
    "uint4": lambda weight: round_to(UINT4, weight),
    "int8": lambda weight: round_to(INT8, weight),
    "uint8": lambda weight: round_to(WeightScheme("int8", zero_points=True), weight),
} | {
    kind: lambda weight, kind=kind: read_codes(
        kind,
        gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]),
        torch.float32,
    )
    for kind in EXACT
}


@pytest.mark.parametrize("names", list(itertools.combinations(SCHEMES, 2)), ids="+".join)
def test_codes_of_layers_that_read_the_same_tensor_are_made_alike(names: tuple[str, str]):
    random = torch.Generator().manual_seed(0)
    parts = [SCHEMES[name](torch.randn(8, 64, generator=random)) for name in names]
    made = alike(parts)
    first, second = ((part.scheme, part.offsets is None) for part in made)
    assert first == second
    for part, same in zip(parts, made, strict=True):
        assert torch.equal(part.dequantized(), same.dequantized())
        assert (same.zero_points is not None) == same.scheme.zero_points
        if not any(name.startswith("u") for name in names):  # zero points are rounded
            assert np.array_equal(unsigned_values(same), part.dequantized().numpy())


Kinds = Mapping[str, str]
"""GGUF's types by a part of the tensors' names; other tensors are in float32."""


def write_kinds(model: Path, path: Path, kinds: Kinds, **options: Any) -> Path:
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(writer: gguf.GGUFWriter, name: str, array: Any) -> None:
        kind = next((kind for part, kind in kinds.items() if part in name), "F32")
        if kind == "F32" or array.ndim == 1:
            add_tensor(writer, name, array)
        else:
            gguf_type = gguf.GGMLQuantizationType[kind]
            data = (
                random_blocks(kind, array.shape, scale=0.01)
                if kind in NOT_WRITTEN
                else gguf.quants.quantize(array, gguf_type)
            )
            add_tensor(writer, name, data, raw_dtype=gguf_type)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        return write_gguf(model, path, **options)


MIXED = {
    "attn_q": "Q4_0",
    "attn_k": "Q4_1",
    "attn_v": "Q8_0",
    "attn_output": "Q5_0",
    "ffn_gate": "Q4_1",
    "ffn_up": "Q4_1",
    "ffn_down": "Q5_1",
    "token_embd": "Q8_0",
    "output.weight": "Q4_0",
}
FIVE_BITS = 0.16
"""The largest error of 5 bits relative to the largest value: they may cover 0.85 of a block."""


def in_8_bits(name: str) -> bool:
    return name.endswith("v_proj.weight")


def schemes_of(quantized: QuantizedModel) -> dict[str, str]:
    names = (*(f"layers.0.{name}" for name in LAYERS), "lm_head")
    parts = {name: quantized.weights[weight_name(name)] for name in names}
    return {
        name.rpartition(".")[2].removesuffix("_proj"): (
            f"{'u' if part.scheme.zero_points else ''}{part.scheme.code_type}"
            f"{'' if part.offsets is None else '+'}"
        )
        for name, part in parts.items()
    }


LAYERS = [f"self_attn.{name}_proj" for name in "qkvo"]
LAYERS += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untied")
    return make_model(directory, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def mixed_file(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kinds(untied, tmp_path_factory.mktemp("mixed") / "mixed.gguf", MIXED)


@pytest.fixture(scope="module")
def mixed_bundle(mixed_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundles") / "mixed"
    return export_bundle(mixed_file, output, lookahead=2, weights="int4")


@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_a_model_keeps_its_values_in_both_formats(mixed_file: Path, weights: str):
    expected = dict(load_path(mixed_file).model.named_parameters())
    model, quantized = quantize(mixed_file, weights)
    assert quantized.calibration is None
    for name, tensor in model.named_parameters():
        is_rounded = weights == "int4" and in_8_bits(name)
        limit = FIVE_BITS * float(tensor.abs().max()) if is_rounded else 0
        assert torch.allclose(tensor, expected[name], rtol=0, atol=limit), name
        if is_rounded:
            assert quantized.weights[f"model.{name}"].unsigned()[1] == 5
    assert schemes_of(quantized) == {
        **dict.fromkeys("qkv", "int8+"),
        "o": "int8",
        "gate": "uint4+",
        "up": "uint4+",
        "down": "int8+",
        "lm_head": "int4",
    }


def test_the_manifest_has_the_formats_of_the_file(mixed_bundle: Path):
    quantization = read_manifest(mixed_bundle).model.quantization
    assert quantization is not None and quantization.lm_head is not None
    assert quantization.calibration is None
    grid, lm_head = quantization.grid, quantization.lm_head
    assert (grid.numbers, grid.offsets, grid.zero_points) == ("int8", True, False)
    assert (lm_head.numbers, lm_head.offsets, lm_head.zero_points) == ("int4", False, False)
    gate = quantization.layers["layers.1.mlp.gate_proj"]
    assert (gate.numbers, gate.offsets, gate.zero_points) == ("int4", True, True)


def test_onnx_runtime_fuses_products_and_sums_of_blocks(mixed_bundle: Path, tmp_path: Path):
    graph = optimized_graph(mixed_bundle / "trunk.onnx", tmp_path)
    # Each of two layers has 5 products, because q, k and v are one, and the sums of the blocks of 3
    # inputs, since gate and up read the same. The LM head is one more product.
    assert count(graph, "MatMulNBits") == 11 + 6 and not count(graph, "DequantizeLinear")
    assert count(graph, "MatMul") == 8  # products of sums and offsets


def test_an_engine_of_weights_with_zero_points_is_refused(mixed_bundle: Path):
    with pytest.raises(PassError, match="with --weights int4 --no-zero-points"):
        check_formats(read_manifest(mixed_bundle), ["sm89"])


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"zero_points": False}], ids=str)
def test_codes_with_offsets_are_rounded_where_engines_may_be_built(mixed_file, options):
    _, quantized = quantize(mixed_file, calibrate=Path("none"), **options)
    assert schemes_of(quantized) == {
        **dict.fromkeys("qkv", "int8"),
        "o": "int8",
        "gate": "int4",
        "up": "int4",
        "down": "int8",
        "lm_head": "int4",
    }


@pytest.mark.parametrize(("spread", "bits"), [(1, 5), (30, 8)])
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_int4_gives_the_head_5_bits_if_that_hardly_changes_its_choices(
    tied: Path, tmp_path: Path, kind: str, spread: int, bits: int
):
    model = AutoModelForCausalLM.from_pretrained(tied)
    with torch.no_grad():
        model.model.norm.weight.mul_(spread)
    model.save_pretrained(tmp_path / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tied / file, tmp_path / "model")
    path = write_kinds(tmp_path / "model", tmp_path / "model.gguf", {"token_embd": kind})
    model, quantized = quantize(path, calibrate=Path("none"))
    head = quantized.weights[weight_name("lm_head")]
    assert head.unsigned()[1] == bits and quantized.table is head
    assert torch.equal(model.get_input_embeddings().weight, head.dequantized())
    _, in_int8 = quantize(path, "int8")
    assert in_int8.weights[weight_name("lm_head")].unsigned()[1] == 8


def test_k_quants_of_a_file_are_kept(tmp_path: Path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = make_model(tmp_path / "model", tie_word_embeddings=False, **sizes)
    kinds = {"attn": "Q4_K", "ffn": "Q5_K", "output.": "Q8_0"}
    path = write_kinds(model, tmp_path / "model.gguf", kinds)
    expected = dict(load_path(path).model.named_parameters())
    model, quantized = quantize(path)
    for name, tensor in model.named_parameters():
        limit = FIVE_BITS if name == "lm_head.weight" else 2**-10
        limit *= float(expected[name].abs().max())
        assert torch.allclose(tensor, expected[name], rtol=0, atol=limit), name
    assert schemes_of(quantized) == {
        **dict.fromkeys(("q", "k", "v", "o"), "uint4+"),
        **dict.fromkeys(("gate", "up", "down"), "int8+"),
        "lm_head": "int8",
    }
    assert quantized.weights[weight_name("layers.0.mlp.up_proj")].unsigned()[1] == 5


def test_other_types_are_rounded(untied: Path, tmp_path: Path):
    """Floats as the format says, others to 8 bits, which need no text."""
    floats = {"attn_output": "F16", "ffn_down": "F32"}
    kinds = {"attn": "Q4_0", "ffn": "Q8_0", "output.": "IQ4_NL"}
    path = write_kinds(untied, tmp_path / "model.gguf", floats | kinds)
    _, quantized = quantize(path, calibrate=Path("none"))
    assert schemes_of(quantized) == {
        **dict.fromkeys("qkv", "int4"),
        "o": "uint4",
        "gate": "int8",
        "up": "int8",
        "down": "uint4",
        "lm_head": "int8",
    }


def test_text_is_written_only_for_layers_that_need_it(untied, tmp_path, monkeypatch):
    texts: list[int] = []
    own_ids = run.own_ids
    monkeypatch.setattr(run, "own_ids", lambda *given: texts.append(1) or own_ids(*given))
    for kinds, count_of_texts in (
        ({"": "Q8_0"}, 0),
        ({"ffn_down": "F16", "": "Q8_0"}, 1),
    ):
        path = write_kinds(untied, tmp_path / f"{count_of_texts}.gguf", kinds)
        _, quantized = quantize(path)
        assert len(texts) == count_of_texts
        assert quantized.calibration == ("the model's own text" if texts else None)


def test_a_text_that_was_not_needed_is_reported(mixed_file: Path, tmp_path: Path):
    (tmp_path / "text.txt").write_text("a text")
    with pytest.warns(UserWarning, match="--calibrate was not needed"):
        quantize(mixed_file, calibrate=tmp_path / "text.txt")


@pytest.mark.parametrize(("kind", "scheme"), [("Q4_1", "uint4+"), ("F16", "int8")])
def test_embeddings_that_are_the_head_have_the_values_of_its_codes(tied, tmp_path, kind, scheme):
    kinds = {"token_embd": kind, "": "Q8_0"}
    path = write_kinds(tied, tmp_path / "model.gguf", kinds)
    model, quantized = quantize(path)
    head = quantized.weights[weight_name("lm_head")]
    assert quantized.table is head and schemes_of(quantized)["lm_head"] == scheme
    assert torch.equal(model.get_input_embeddings().weight, head.dequantized())
    assert torch.equal(model.lm_head.weight, head.dequantized())
    assert quantized.calibration is None  # such a head is rounded to the nearest codes


def test_codes_that_transformers_reads_otherwise_are_refused(mixed_file: Path):
    model = load_path(mixed_file).model
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.flip(0)
    codes = GgufCodes(mixed_file, model, with_offsets=True)
    with pytest.raises(PassError, match=r"codes of layers.0.self_attn.q_proj .* do not fit"):
        codes.codes("layers.0.self_attn.q_proj", weight)


def test_codes_of_a_split_file_are_kept(untied: Path, tmp_path: Path):
    write_kinds(untied, tmp_path / "model.gguf", {"": "Q5_0"}, split_max_tensors=9)
    first, *others = sorted(tmp_path.glob("model-*.gguf"))
    assert others
    _, quantized = quantize(first)
    assert all(weight.unsigned()[1] == 5 for weight in quantized.weights.values())


@pytest.mark.slow
def test_the_weights_of_a_real_file_keep_their_values():
    path = Path(str(resolve(SMOLLM2).location))
    expected = dict(load_path(path).model.named_parameters())
    model, quantized = quantize(path)
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, expected.get(name, expected["model.embed_tokens.weight"])), name
    bits = {name: weight.unsigned()[1] for name, weight in quantized.weights.items()}
    assert bits.pop(weight_name("lm_head")) == 8 and set(bits.values()) == {4}
