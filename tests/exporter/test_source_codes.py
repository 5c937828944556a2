"""`--weights source`: weights of a .gguf file in Q4_0, Q4_1 and Q8_0 keep their values exactly."""

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
    """Return a weight [out,in] with a block of zeros, one of equal values, and one of positive
    values."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) ** 3
    weight[0, :32], weight[1, :32] = 0, -0.5
    weight[2, :32] = weight[2, :32].abs() + 2
    return weight


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {"Q4_0": ("int4", False), "Q4_1": ("int4", True), "Q8_0": ("int8", False)}
"""By type of GGUF, the type of the codes in an export, and whether its blocks have offsets."""


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
    """llama.cpp chooses such scales if it has an importance matrix."""
    generator = torch.Generator().manual_seed(1)
    scale = (torch.rand(64, 4, 1, generator=generator) / 50).half().float()
    least, largest = {"Q4_0": (-8, 5), "Q4_1": (2, 14), "Q8_0": (-93, 99)}[kind]
    codes = torch.randint(least, largest + 1, (64, 4, 32), generator=generator).float()
    weight = codes * scale
    if kind == "Q4_1":
        weight += (torch.randn(64, 4, 1, generator=generator) / 10).half().float()
    (kept,) = recover_together(["q"], [weight.flatten(1)])
    assert (kept.scheme.code_type, kept.offsets is not None) == KINDS[kind]
    assert torch.equal(kept.dequantized(), weight.flatten(1))


def test_layers_of_several_types_in_one_product_keep_their_values():
    """llama.cpp may give V more bits than Q and K. The one product of all three then has 8-bit
    codes and offsets."""
    weights = [of_type(kind, make_weight(24, 96) / n) for n, kind in enumerate(KINDS, 1)]
    kept = recover_together(("q", "k", "v"), weights)
    for part, weight in zip(kept, weights, strict=True):
        assert part.scheme == INT8 and part.offsets is not None
        assert torch.equal(part.dequantized(), weight)


def test_weights_that_were_not_dequantized_from_codes_are_refused():
    """Even if only one number differs."""
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
        layer = name.split(".")[1:2]  # empty for the LM head
        tensor = tensors[GGUF_NAMES[name.rpartition(".")[2]].format(*layer)]
        stored = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        weight = packed.dequantized()
        if name.endswith(("q_proj", "k_proj")):  # their rows have another order in the file
            stored, weight = sorted_rows(stored), sorted_rows(weight)
        assert torch.equal(weight, stored), name
    assert {part.scheme.code_type for name, part in kept.items() if name != "lm_head"} == {"int4"}
    assert kept["lm_head"].scheme == INT8


GGUF_NAMES = {"lm_head": "token_embd.weight", "o_proj": "blk.{}.attn_output.weight"}
GGUF_NAMES |= {f"{part}_proj": f"blk.{{}}.attn_{part}.weight" for part in "qkv"}
GGUF_NAMES |= {f"{part}_proj": f"blk.{{}}.ffn_{part}.weight" for part in ("gate", "up", "down")}


def sorted_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return the rows in the order of their products with random numbers, which differ by row."""
    random = torch.Generator().manual_seed(0)
    numbers = torch.rand(weight.shape[1], generator=random, dtype=torch.float64)
    return weight[weight.double().mv(numbers).argsort()]


@pytest.fixture(scope="module")
def q4_1_export(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A bundle exported from a file in Q4_1, and the file's weights by name."""
    return export_of_type("Q4_1", tmp_path_factory.mktemp("q4_1"))


@pytest.fixture(scope="module")
def q4_1_bundle(q4_1_export: tuple[Path, dict[str, torch.Tensor]]) -> Path:
    return q4_1_export[0]


def weights_in(bundle: Path) -> dict[str, np.ndarray]:
    """Return the dequantized weights [out,in] of the trunk by name, offsets included."""
    graph = onnx.load(bundle / "trunk.onnx").graph
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {}
    for codes_name in [name for name in stored if name.endswith((".int4", ".int8"))]:
        name = codes_name.rpartition(".")[0]
        weight, scale = stored[codes_name].astype(np.float32), stored[f"{codes_name}.scale"]
        block_size = len(weight) // len(scale)
        if (zero_point := stored.get(f"{codes_name}.zero_point")) is not None:
            weight -= zero_point.astype(np.float32).repeat(block_size, 0)
        weight *= scale.repeat(block_size, 0)
        if (offsets := stored.get(f"{name}.offsets")) is not None:
            weight += offsets.repeat(block_size, 0)[: len(weight)]
        weights[name] = weight.T
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_of_a_bundle_are_those_of_the_file(
    kind: str, q4_1_export: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    bundle, tensors = q4_1_export if kind == "Q4_1" else export_of_type(kind, tmp_path)
    weights = {name: weight for name, weight in weights_in(bundle).items() if "lm_head" not in name}
    # Seven linear layers in each of two decoder layers; the weights of q, k and v are one.
    assert sum(name.count("_proj") for name in weights) == 14
    assert sum("_proj" in name for name in tensors) == 14
    for name, weight in weights.items():
        parts = name.split("+")
        names = [part.removeprefix("model.").removesuffix(".transposed") for part in parts]
        expected = np.concatenate([tensors[part].numpy() for part in names])
        assert np.array_equal(weight, expected), name


def test_the_manifest_has_the_formats_of_the_file(q4_1_bundle: Path):
    """The embeddings, and so the LM head, are in Q8_0."""
    quantization = read_manifest(q4_1_bundle).model.quantization
    assert quantization is not None and quantization.lm_head is not None
    assert not quantization.layers
    grid, lm_head = quantization.grid, quantization.lm_head
    assert (grid.numbers, grid.offsets, grid.zero_points) == ("int4", True, True)
    assert (lm_head.numbers, lm_head.offsets, lm_head.zero_points) == ("int8", False, False)


def test_onnx_runtime_fuses_products_and_sums_of_blocks(q4_1_bundle: Path, tmp_path: Path):
    graph = optimized_graph(q4_1_bundle / "trunk.onnx", tmp_path)
    # Each of two layers has 5 products, because q, k and v are one, and the sums of the blocks of 4
    # inputs, since gate and up read the same. The LM head is one more product.
    assert count(graph, "MatMulNBits") == 11 + 8 and not count(graph, "DequantizeLinear")
    assert count(graph, "MatMul") == 10  # products of sums and offsets


def test_plans_batches_and_capacities_do_not_change_bits(q4_1_bundle: Path):
    check_widths(q4_1_bundle)


def test_an_engine_of_weights_with_offsets_is_refused(q4_1_bundle: Path):
    with pytest.raises(PassError, match="with --weights int4 --no-zero-points"):
        check_formats(read_manifest(q4_1_bundle), ["sm89"])


def test_weights_source_is_refused_for_other_checkpoints_than_gguf_files(
    tiny_model: Path, tmp_path: Path
):
    flags = ("--model", tiny_model, "--weights", "source", "-o", tmp_path / "bundle")
    assert "keeps the codes of a .gguf file, which" in error_line(command(*flags))


def test_a_gguf_file_with_tensors_of_another_type_is_refused(tmp_path: Path):
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
