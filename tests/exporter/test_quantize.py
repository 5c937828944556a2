"""int4 and int8 weights: how far rounding moves a weight, and what a quantized bundle is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from export_process import error_line, process
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import export_bundle
from pass_exporter.trunk.quantize import BLOCK, LARGEST, quantize
from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.testing.lossless import first_difference, run_tokens


@pytest.mark.parametrize("kind", ["int8", "int4"])
@settings(derandomize=True, deadline=None, max_examples=50)
@given(data=st.data())
def test_a_weight_moves_by_half_a_step_at_most(kind, data):
    blocks, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight = rng.standard_t(3, (blocks * BLOCK, columns)).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 6))
    weight[:, 0] = 0  # a column of zeros stays one
    integers, scales = quantize(weight, kind)
    assert integers.shape == weight.shape and scales.shape == (blocks, columns)
    assert integers.min() >= -LARGEST[kind] - 1 and integers.max() <= LARGEST[kind]
    steps = scales.repeat(BLOCK, 0)
    restored = integers * steps
    cover = np.abs(weight.reshape(blocks, BLOCK, columns)).max(1).repeat(BLOCK, 0) / LARGEST[kind]
    inside = np.abs(weight) <= steps * LARGEST[kind]
    assert (np.abs(restored - weight)[inside] <= 0.5001 * steps[inside]).all()
    plain = np.rint(weight / np.where(cover > 0, cover, 1)) * cover
    assert ((restored - weight) ** 2).sum() <= ((plain - weight) ** 2).sum() * 1.0001, (
        "worse than no search for a scale"
    )
    assert not restored[:, 0].any()


def test_int8_keeps_what_it_has_made():
    weight = np.random.default_rng(0).normal(0, 1, (2 * BLOCK, 5)).astype(np.float32)
    integers, scales = quantize(weight, "int8")
    again, same = quantize(integers * scales.repeat(BLOCK, 0), "int8")
    assert np.array_equal(again, integers) and np.allclose(same, scales, rtol=1e-6)


@pytest.fixture(scope="module")
def int4_bundle(tiny_model: Path, adapter_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export's own check has compared it with torch, quantized the same way."""
    output = tmp_path_factory.mktemp("bundles") / "int4"
    return export_bundle(tiny_model, output, lookahead=3, weights="int4", lookahead_weights=adapter_weights)


def test_every_linear_layer_is_quantized_and_the_adapter_in_int8(int4_bundle: Path):
    graph = onnx.load(int4_bundle / "trunk.onnx", load_external_data=False).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    by_output = {node.output[0]: node for node in graph.node}
    found: dict[int, int] = {}
    for node in graph.node:
        if node.op_type == "MatMul":
            weight = by_output.get(node.input[1])
            kind = kinds[weight.input[0]] if weight is not None else kinds[node.input[1]]
            found[kind] = found.get(kind, 0) + 1
    # Two layers of q+k+v, o, gate, up and down, and the LM head; A of four adapted layers (their B is of rank 4 only).
    assert found == {onnx.TensorProto.INT4: 11, onnx.TensorProto.INT8: 4, onnx.TensorProto.FLOAT: 4}


@pytest.mark.parametrize("values", [(0.0, 0, 1.0), (0.9, 0, 1.0), (0.9, 40, 0.9)], ids=str)
def test_quantized_bundles_are_lossless_too(int4_bundle: Path, values: tuple[float, int, float]):
    session = load(int4_bundle, "cpu")
    assert session.manifest.model.weights == "int4"
    prompt = session.encode("def add(a, b):\n    return a + b\ndef add(a")
    for seed in (0, 5):
        sampling = SamplingParams(*values, seed)
        plain = run_tokens(session, prompt, GenerateOptions(48, sampling, "ar", ignore_eos=True)).token_ids
        for plan in ("two-pass", "fused", "fused:2,1,0", "auto"):
            options = GenerateOptions(48, sampling, plan, ignore_eos=True)
            tokens = run_tokens(session, prompt, options).token_ids
            difference = first_difference(session, prompt, options, plain, tokens)
            assert difference is None or difference.is_near_tie, f"{plan}: {difference}"


def test_verify_reports_quality(tiny_model: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    flags = ("--model", tiny_model, "--lookahead", 1, "--verify", text)
    done = process(*flags, "-o", tmp_path / "full")
    assert done.returncode == 0, done.stderr
    assert "greedy agreement        100.0 % of tokens" in done.stderr
    full = next(line for line in done.stderr.splitlines() if line.startswith("perplexity"))
    assert full.split()[1].rstrip(",") == full.split()[6]  # of the bundle, of torch


def test_verify_needs_text(tiny_model: Path, tmp_path: Path):
    (tmp_path / "short.txt").write_text("too short")
    flags = ("--model", tiny_model, "--lookahead", 1, "-o", tmp_path / "bundle", "--verify")
    assert "at least 256" in error_line(process(*flags, tmp_path / "short.txt"))
    assert "No such file" in error_line(process(*flags, tmp_path / "none.txt"))
    assert not (tmp_path / "bundle").exists()
