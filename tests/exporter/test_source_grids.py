"""Weights that were in GGUF's Q4_0, Q4_1 or Q8_0 stay what they were."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from export_process import error_line, process
from test_derived import check_widths

from conftest import export_bundle, make_model
from pass_exporter.engines.target import check_dtype
from pass_exporter.model.registry import Source
from pass_exporter.quantize.grid import round_to
from pass_exporter.quantize.source import check_source, keep_fours
from pass_exporter.quantize.spec import INT8
from pass_runtime import PassError, read_manifest


def on_grid(kind: str, weight: torch.Tensor) -> torch.Tensor:
    """[out,in] as llama.cpp's format of that name holds it, in float32."""
    found = getattr(gguf.GGMLQuantizationType, kind)
    packed = gguf.quants.quantize(np.ascontiguousarray(weight.float().numpy()), found)
    return torch.from_numpy(gguf.quants.dequantize(packed, found).copy())


def make_weight(outputs: int, inputs: int) -> torch.Tensor:
    """With a block of zeros, one of equal numbers, and one that is above zero."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)) ** 3
    weight[0, :32], weight[1, :32] = 0, -0.5
    weight[2, :32] = weight[2, :32].abs() + 2
    return weight


@pytest.mark.parametrize(("kind", "tolerance"), [("Q4_0", 1e-6), ("Q4_1", 0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_four_bits_stay_four_bits(kind: str, tolerance: float, dtype: torch.dtype):
    weight = on_grid(kind, make_weight(24, 96)).to(dtype)
    kept = keep_fours([weight])
    assert kept is not None and kept[0].grid.numbers == "int4" and kept[0].sums == (0 if kind == "Q4_0" else 32)
    steps = kept[0].scales[:, :3].float().repeat_interleave(32, 1)
    moved = (kept[0].restored().float() - weight.float()).abs()
    assert kept[0].restored().shape == weight.shape and kept[0].restored().dtype == dtype
    ordinary = torch.ones(24, dtype=torch.bool)
    ordinary[:3] = False
    assert moved[ordinary].pow(2).mean().sqrt() <= 3 * tolerance * steps[ordinary].mean() + 2e-3 * (
        dtype != torch.float32
    )


def test_eight_bits_are_kept_in_int8():
    weight = on_grid("Q8_0", make_weight(24, 96))
    assert keep_fours([weight]) is None
    assert torch.allclose(round_to(INT8, weight).restored(), weight, rtol=1e-3, atol=1e-6)


def test_what_is_on_no_grid_or_on_two_is_not_kept():
    weight = make_weight(24, 96)
    assert keep_fours([weight]) is None
    assert keep_fours([on_grid("Q4_0", weight), on_grid("Q4_1", weight)]) is None
    almost = on_grid("Q4_1", weight)
    almost[20, 40] *= 1.01
    assert keep_fours([almost]) is None


@pytest.fixture(scope="module")
def four_bit_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` from a model whose decoder was in Q4_1. The export's own check has compared it with torch."""
    from safetensors.torch import load_file, save_file

    directory = make_model(tmp_path_factory.mktemp("models") / "q4_1", tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    on_it = {name: on_grid("Q4_1", tensor) for name, tensor in tensors.items() if "_proj" in name}
    save_file(tensors | on_it, directory / "model.safetensors", {"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pass_exporter.export.check_source", lambda _: None)  # it is no .gguf file
        return export_bundle(directory, tmp_path_factory.mktemp("bundles") / "q4_1", lookahead=2, weights="source")


def test_the_manifest_says_what_was_kept(four_bit_bundle: Path):
    found = read_manifest(four_bit_bundle).model.quantization
    assert found is not None and found.lm_head is not None and not found.layers
    assert (found.grid.numbers, found.grid.offsets, found.grid.zero_points) == ("int4", True, True)
    assert (found.lm_head.numbers, found.lm_head.offsets, found.lm_head.zero_points) == ("int8", False, False)


def test_onnx_runtime_fuses_the_sums_of_blocks_too(four_bit_bundle: Path, tmp_path: Path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(four_bit_bundle / "trunk.onnx", options, providers=["CPUExecutionProvider"])
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph.node]
    # Two layers of q+k+v, o, gate, up and down, and the LM head; sums for what q+k+v, o, gate and up, and down read.
    assert kinds.count("MatMulNBits") == 11 + 8 and "DequantizeLinear" not in kinds and "MatMul" not in kinds


def test_widths_agree_bit_for_bit(four_bit_bundle: Path):
    check_widths(four_bit_bundle)


def test_tensorrt_is_refused(four_bit_bundle: Path):
    with pytest.raises(PassError, match="with --weights int4 --no-zero-points"):
        check_dtype(read_manifest(four_bit_bundle), ["sm89"])


def test_source_is_for_gguf_files(tiny_model: Path, tmp_path: Path):
    flags = ("--model", tiny_model, "--weights", "source", "-o", tmp_path / "bundle")
    assert "keeps the grid of a .gguf file, which" in error_line(process(*flags))


def test_other_grids_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q5_1
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(np.ones((2, 64), np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(PassError, match=r"keeps Q4_0, Q4_1, Q8_0; model has Q5_1: choose --weights int4 or int8"):
        check_source(Source("model", path, "file:model.gguf"))
