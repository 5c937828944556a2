"""Weights that were in GGUF's Q4_0, Q4_1 or Q8_0 stay what they were."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from export_process import command, error_line
from test_derived import check_widths

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
    """With a block of zeros, one of equal values, and one that is above zero."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) ** 3
    weight[0, :32], weight[1, :32] = 0, -0.5
    weight[2, :32] = weight[2, :32].abs() + 2
    return weight


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {"Q4_0": ("int4", False), "Q4_1": ("int4", True), "Q8_0": ("int8", False)}
"""What is kept of GGUF's formats: the integers, and whether blocks have offsets."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_value_is_the_files_own(kind: str, dtype: torch.dtype):
    """Bit for bit, as the dtype holds the file's values; bf16 rounds the scales of blocks too."""
    weight = of_type(kind, make_weight(264, 96)).to(dtype)
    (kept,) = recover_together(["q"], [weight])
    assert (kept.scheme.code_type, kept.offsets is not None) == KINDS[kind]
    assert kept.dequantized().dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.allclose(
            kept.dequantized(), weight, rtol=0, atol=2**-6 * float(weight.abs().max())
        )
    else:
        assert torch.equal(kept.dequantized(), weight)


@pytest.mark.parametrize("kind", KINDS)
def test_other_quantizers_choose_other_scales(kind: str):
    """llama.cpp with an importance matrix: the largest value of a block need not be the largest
    number."""
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


def test_layers_that_are_one_product_may_be_of_several_types():
    """llama.cpp gives V more bits: the product has 8-bit integers then, and offsets; all values
    stay what they were."""
    weights = [of_type(kind, make_weight(24, 96) / n) for n, kind in enumerate(KINDS, 1)]
    kept = recover_together(("q", "k", "v"), weights)
    assert [part.scheme for part in kept] == [INT8] * 3 and all(
        part.offsets is not None for part in kept
    )
    assert all(
        torch.equal(part.dequantized(), weight) for part, weight in zip(kept, weights, strict=True)
    )


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
def test_a_real_file_is_kept_as_it_is():
    """The default model's GGUF: Q4_1, and Q8_0 for the table that is the LM head too."""
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
        if name.endswith(("q_proj", "k_proj")):  # the file has their rows in another order
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
"""Their products with these tell rows apart."""


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    return export_of_type("Q4_1", tmp_path_factory.mktemp("q4_1"))


@pytest.fixture(scope="module")
def four_bit_bundle(four_bits: tuple[Path, dict[str, torch.Tensor]]) -> Path:
    return four_bits[0]


def weights_in(bundle: Path) -> dict[str, np.ndarray]:
    """The weights [out,in] of the trunk by name, with offsets, as DequantizeLinear is defined. q, k
    and v are one."""
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_weight_is_the_files_own(
    kind: str, four_bits: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    """Bit for bit: what is written in the trunk stands for the codes of the file."""
    bundle, tensors = four_bits if kind == "Q4_1" else export_of_type(kind, tmp_path)
    found = {name: weight for name, weight in weights_in(bundle).items() if "lm_head" not in name}
    assert (
        sum(name.count("_proj") for name in found) == 14 == sum("_proj" in name for name in tensors)
    )
    for name, weight in found.items():
        parts = [
            part.removeprefix("model.").removesuffix(".transposed") for part in name.split("+")
        ]
        assert np.array_equal(weight, np.concatenate([tensors[part].numpy() for part in parts])), (
            name
        )


def test_the_manifest_says_what_was_kept(four_bit_bundle: Path):
    found = read_manifest(four_bit_bundle).model.quantization
    assert found is not None and found.lm_head is not None and not found.layers
    assert (found.grid.numbers, found.grid.offsets, found.grid.zero_points) == ("int4", True, True)
    assert (found.lm_head.numbers, found.lm_head.offsets, found.lm_head.zero_points) == (
        "int8",
        False,
        False,
    )


def test_onnx_runtime_fuses_the_sums_of_blocks_too(four_bit_bundle: Path, tmp_path: Path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(
        four_bit_bundle / "trunk.onnx", options, providers=["CPUExecutionProvider"]
    )
    kinds = [
        node.op_type
        for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node
    ]
    # Two layers of q+k+v, o, gate, up and down, and the LM head; sums for what q+k+v, o, gate and
    # up, and down read.
    assert kinds.count("MatMulNBits") == 11 + 8 and "DequantizeLinear" not in kinds
    assert kinds.count("MatMul") == 10  # the sums with the offsets, which float32 holds exactly


def test_widths_agree_bit_for_bit(four_bit_bundle: Path):
    check_widths(four_bit_bundle)


def test_tensorrt_is_refused(four_bit_bundle: Path):
    with pytest.raises(PassError, match="with --weights int4 --no-zero-points"):
        check_formats(read_manifest(four_bit_bundle), ["sm89"])


def test_source_is_for_gguf_files(tiny_model: Path, tmp_path: Path):
    flags = ("--model", tiny_model, "--weights", "source", "-o", tmp_path / "bundle")
    assert "keeps the codes of a .gguf file, which" in error_line(command(*flags))


def test_other_types_are_refused_by_name(tmp_path: Path):
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
