"""Weights from GGUF's Q4_0, Q4_1 and Q8_0 keep their values exactly."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
import torch
from export_process import command, error_line
from trunk_graphs import check_widths, count, optimized_graph

from conftest import SMOLLM2
from gguf_models import export_of_type, of_type
from pass_exporter.engines.target import check_formats
from pass_exporter.model.load import load_model
from pass_exporter.model.registry import ModelSource, resolve
from pass_exporter.quantize.recover import recover
from pass_exporter.quantize.source import check_gguf_types, keep_source_codes, recover_together
from pass_exporter.quantize.spec import INT8
from pass_runtime import PassError, read_manifest


def make_weight(outputs: int, inputs: int) -> torch.Tensor:
    """Return [out,in] with a block of zeros, one of equal values, and one of positive values."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) ** 3
    weight[0, :32], weight[1, :32] = 0, -0.5
    weight[2, :32] = weight[2, :32].abs() + 2
    return weight


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {"Q4_0": ("int4", False), "Q4_1": ("int4", True), "Q8_0": ("int8", False)}
"""The integers that an export has for each type, and whether blocks have offsets."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recovered_codes_give_the_same_values(kind: str, dtype: torch.dtype):
    """Bit for bit, except in bf16, in which the scales of blocks are rounded."""
    weight = of_type(kind, make_weight(264, 96)).to(dtype)
    (kept,) = recover_together(["q"], [weight])
    assert (kept.scheme.code_type, kept.offsets is not None) == KINDS[kind]
    assert kept.dequantized().dtype == dtype
    if dtype == torch.bfloat16:
        limit = 2**-6 * float(weight.abs().max())
        assert torch.allclose(kept.dequantized(), weight, rtol=0, atol=limit)
    else:
        assert torch.equal(kept.dequantized(), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_recovered_if_no_block_has_the_largest_code(kind: str):
    """llama.cpp with an importance matrix chooses such scales."""
    generator = torch.Generator().manual_seed(1)
    scale = (torch.rand(64, 4, 1, generator=generator) / 50).half().float()
    most, least = {"Q4_0": (5, -8), "Q4_1": (14, 2), "Q8_0": (99, -93)}[kind]
    codes = torch.randint(least, most + 1, (64, 4, 32), generator=generator).float()
    weight = codes * scale
    if kind == "Q4_1":
        weight += (torch.randn(64, 4, 1, generator=generator) / 10).half().float()
    (kept,) = recover_together(["q"], [weight.flatten(1)])
    assert (kept.scheme.code_type, kept.offsets is not None) == KINDS[kind]
    assert torch.equal(kept.dequantized(), weight.flatten(1))


def test_layers_of_several_types_in_one_product_keep_their_values():
    """llama.cpp gives V more bits than Q and K. The product then has 8-bit integers and offsets."""
    weights = [of_type(kind, make_weight(24, 96) / n) for n, kind in enumerate(KINDS, 1)]
    kept = recover_together(("q", "k", "v"), weights)
    for part, weight in zip(kept, weights, strict=True):
        assert part.scheme == INT8 and part.offsets is not None
        assert torch.equal(part.dequantized(), weight)


def test_weights_of_no_type_are_refused():
    weight = make_weight(24, 96)
    almost = of_type("Q4_1", weight)
    almost[20, 40] *= 1.01
    for other in (weight, almost):
        assert recover(other) is None
        with pytest.raises(
            PassError, match=r"cannot recover the codes of o_proj: choose --weights int4 or int8"
        ):
            recover_together(["o_proj"], [other])


@pytest.mark.slow
def test_the_weights_of_a_real_file_keep_their_values():
    """The default model's .gguf file: Q4_1, and Q8_0 for the tied embeddings and LM head."""
    source = resolve(SMOLLM2)
    model = load_model(source, "fp32").model
    kept = keep_source_codes(model, lambda _done, _total: None)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(source.location)).tensors}
    for name, packed in kept.items():
        tensor = tensors[
            FILE_NAMES.get(name.rpartition(".")[2], name).format(*name.split(".")[1:2])
        ]
        own = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        found = packed.dequantized()
        if name.endswith(("q_proj", "k_proj")):  # their rows have another order in the file
            own, found = (
                weight[weight.double().mv(MARKS[: weight.shape[1]]).argsort()]
                for weight in (own, found)
            )
        assert torch.equal(found, own), name
    assert {part.scheme.code_type for name, part in kept.items() if name != "lm_head"} == {"int4"}
    assert kept["lm_head"].scheme == INT8


FILE_NAMES = {"lm_head": "token_embd.weight"}
FILE_NAMES |= {f"{part}_proj": f"blk.{{}}.attn_{part}.weight" for part in "qkv"} | {
    "o_proj": "blk.{}.attn_output.weight"
}
FILE_NAMES |= {f"{part}_proj": f"blk.{{}}.ffn_{part}.weight" for part in ("gate", "up", "down")}
MARKS = torch.rand(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
"""The product of a row with these numbers identifies the row."""


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    return export_of_type("Q4_1", tmp_path_factory.mktemp("q4_1"))


@pytest.fixture(scope="module")
def four_bit_bundle(four_bits: tuple[Path, dict[str, torch.Tensor]]) -> Path:
    return four_bits[0]


def weights_in(bundle: Path) -> dict[str, np.ndarray]:
    """Return the dequantized weights [out,in] of the trunk by name, offsets included."""
    graph = onnx.load(bundle / "trunk.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    found = {}
    for name in [name for name in stored if name.endswith((".int4", ".int8"))]:
        codes = stored[name].astype(np.float32)
        zero, size = stored.get(f"{name}.zero_point"), len(codes) // len(stored[f"{name}.scale"])
        weight = codes - (0 if zero is None else zero.astype(np.float32).repeat(size, 0))
        weight *= stored[f"{name}.scale"].repeat(size, 0)
        if (offsets := stored.get(f"{name.rpartition('.')[0]}.offsets")) is not None:
            weight += offsets.repeat(size, 0)[: len(weight)]
        found[name.rpartition(".")[0]] = weight.T
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_bundle_are_those_of_the_file(
    kind: str, four_bits: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    bundle, tensors = four_bits if kind == "Q4_1" else export_of_type(kind, tmp_path)
    found = {name: weight for name, weight in weights_in(bundle).items() if "lm_head" not in name}
    assert sum(name.count("_proj") for name in found) == 14
    assert sum("_proj" in name for name in tensors) == 14
    for name, weight in found.items():
        names = [
            part.removeprefix("model.").removesuffix(".transposed") for part in name.split("+")
        ]
        expected = np.concatenate([tensors[part].numpy() for part in names])
        assert np.array_equal(weight, expected), name


def test_the_manifest_has_the_formats_of_the_file(four_bit_bundle: Path):
    found = read_manifest(four_bit_bundle).model.quantization
    assert found is not None and found.lm_head is not None and not found.layers
    formats = [
        (each.numbers, each.offsets, each.zero_points) for each in (found.grid, found.lm_head)
    ]
    assert formats == [("int4", True, True), ("int8", False, False)]


def test_onnx_runtime_fuses_products_and_sums_of_blocks(four_bit_bundle: Path, tmp_path: Path):
    graph = optimized_graph(four_bit_bundle / "trunk.onnx", tmp_path)
    # In each of two layers, 5 products (q, k and v are one) and the sums of their 4 inputs; the LM
    # head.
    assert count(graph, "MatMulNBits") == 11 + 8 and not count(graph, "DequantizeLinear")
    assert count(graph, "MatMul") == 10  # sums times offsets


def test_widths_do_not_change_bits(four_bit_bundle: Path):
    check_widths(four_bit_bundle)


def test_engines_are_refused(four_bit_bundle: Path):
    with pytest.raises(PassError, match="with --weights int4 --no-zero-points"):
        check_formats(read_manifest(four_bit_bundle), ["sm89"])


def test_source_is_for_gguf_files(tiny_model: Path, tmp_path: Path):
    flags = ("--model", tiny_model, "--weights", "source", "-o", tmp_path / "bundle")
    assert "keeps the codes of a .gguf file, which" in error_line(command(*flags))


def test_a_file_of_another_type_is_refused(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q5_1
    writer.add_tensor(
        "blk.0.attn_q.weight",
        gguf.quants.quantize(np.ones((2, 64), np.float32), kind),
        raw_dtype=kind,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        PassError, match=r"keeps Q4_0, Q4_1, Q8_0; model has Q5_1: choose --weights int4 or int8"
    ):
        check_gguf_types(ModelSource("model", path, "file:model.gguf"))
