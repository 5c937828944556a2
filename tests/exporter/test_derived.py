"""The trunks for CPUs: what was rewritten, and nothing else. (Every export compares them with torch
as well.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from conftest import export_bundle, make_model
from pass_runtime.backends.ort.engine import open_session
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS, PAST, cache_names

LENGTHS = (9, 30)
opened = cache(open_session)


@pytest.fixture(scope="module")
def int4_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("int4")


ONE, BATCHES = 1, 2
"""Slots, which decide what trunk a session runs."""


def graphs(bundle: Path, slots: int = BATCHES) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    manifest = read_manifest(bundle)
    files = (manifest.trunk.file, manifest.trunk_file("cpu", slots))
    portable, derived = (onnx.load(bundle / file, load_external_data=False) for file in files)
    assert portable.metadata_props == derived.metadata_props
    return portable.graph, derived.graph


def count(graph: onnx.GraphProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in graph.node)


def queries(graph: onnx.GraphProto) -> set[str]:
    """The operators that make the queries of attention."""
    makers = {name: node.op_type for node in graph.node for name in node.output}
    return {makers[node.input[0]] for node in graph.node if node.op_type == "Attention"}


def run(
    bundle: Path, file: str, plan: Plan, batch: int = 1, capacity: int = 64, *, exact: bool = False
) -> list[np.ndarray]:
    """Logits of every row, and the cache, of a window behind LENGTHS tokens, which are the same for
    every file.

    exact: without the rounding of activations to 8 bits, of which a difference of 1e-7 can make one
    of 1e-4.
    """
    manifest = read_manifest(bundle)
    model, rng = manifest.model, np.random.default_rng(0)
    session = opened(bundle / file, "cpu", exact=exact)
    tokens = rng.integers(0, model.vocab_size, (len(LENGTHS), 64))[:batch]
    ids = tokens[:, : plan.width].copy()
    ids[:, plan.width - len(plan.lookahead_rows) :] = plan.lookahead_ids(model.vocab_size)
    feed = {
        "input_ids": ids,
        "row_position": plan.row_position,
        "window_mask": plan.window_mask,
        "length": np.array(LENGTHS[:batch]),
        "logit_rows": np.arange(plan.width),
    }
    if manifest.lookahead.adapter_rank:
        feed[LOOKAHEAD_ROWS] = plan.lookahead_rows
    for name in cache_names(PAST, model.layers):
        past = rng.standard_normal((len(LENGTHS), model.kv_heads, 64, model.head_dim), np.float32)
        feed[name] = np.zeros((batch, model.kv_heads, capacity, model.head_dim), model.dtype)
        feed[name][:, :, :40] = past[:batch, :, :40]
    return session.run(None, feed)


@pytest.mark.parametrize("slots", [ONE, BATCHES])
def test_it_has_no_weights_of_its_own(int4_bundle: Path, slots: int):
    portable, derived = graphs(int4_bundle, slots)
    stored = {
        tensor.name: tensor.external_data for tensor in portable.initializer if tensor.external_data
    }
    shared = {
        tensor.name: tensor.external_data for tensor in derived.initializer if tensor.external_data
    }
    assert shared == stored
    assert not list(int4_bundle.glob("trunk.cpu*.data"))


def test_query_heads_are_rows_of_their_key_head(int4_bundle: Path):
    """So that no product has a single row, which would be rounded otherwise; the portable trunk has
    a spare row."""
    portable, derived = graphs(int4_bundle)
    layers = read_manifest(int4_bundle).model.layers
    assert queries(portable) == {"Concat"} and queries(derived) == {"Reshape"}
    assert (
        count(portable, "RotaryEmbedding") == 2 * layers
        and count(derived, "RotaryEmbedding") == layers
    )
    assert count(derived, "Attention") == count(portable, "Attention") == layers


def test_one_sequence_has_one_node_for_a_layers_attention(int4_bundle: Path):
    portable, derived = graphs(int4_bundle, ONE)
    assert count(derived, "GroupQueryAttention") == count(portable, "Attention") > 0
    assert not any(
        count(derived, op) for op in ("Attention", "TensorScatter", "RotaryEmbedding", "Split")
    )


@pytest.mark.parametrize(
    "plan", [*make_cycle("fused", 3).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)]
)
def test_one_sequence_agrees_with_the_portable_trunk_and_itself(int4_bundle: Path, plan: Plan):
    """With the same bits for every width and capacity, also one that the window and its spare entry
    just fill."""
    expected, found = (
        run(int4_bundle, file, plan, exact=True) for file in ("trunk.onnx", "trunk.cpu.one.onnx")
    )
    end = LENGTHS[0] + plan.width
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5 * np.abs(expected[0]).max())
    for after, wanted in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(
            after[:, :, :end], wanted[:, :, :end], atol=1e-5 * np.abs(wanted).max()
        )
    alone = run(int4_bundle, "trunk.cpu.one.onnx", make_cycle("ar", 0).plans[0], capacity=41)[0][
        0, 0
    ]
    for capacity in (41, 64, 320):
        assert np.array_equal(
            run(int4_bundle, "trunk.cpu.one.onnx", plan, capacity=capacity)[0][0, 0], alone
        )


@pytest.mark.parametrize("slots", [ONE, BATCHES])
def test_residuals_are_added_and_normalized_in_one_node(int4_bundle: Path, slots: int):
    portable, derived = graphs(int4_bundle, slots)
    layers = read_manifest(int4_bundle).model.layers
    assert count(derived, "SkipSimplifiedLayerNormalization") == 2 * layers
    assert count(portable, "RMSNormalization") == 2 * layers + 1
    assert count(derived, "RMSNormalization") == 1  # of the embeddings, to which nothing is added


@pytest.mark.parametrize("slots", [ONE, BATCHES])
def test_passes_without_lookahead_rows_run_no_node_of_the_adapter(int4_bundle: Path, slots: int):
    """And have the same bits as in the trunk that has the adapter."""
    manifest = read_manifest(int4_bundle)
    derived, plain = (
        manifest.derived_trunk("cpu", slots, lookahead_rows=rows) for rows in (True, False)
    )
    assert derived is not None and plain is not None and derived.batch == plain.batch
    small, large = (
        onnx.load(int4_bundle / each.file, load_external_data=False).graph
        for each in (plain, derived)
    )
    assert count(large, "ScatterND") == 2 * manifest.model.layers and not count(small, "ScatterND")
    for plan in (
        make_cycle("ar", 0).plans[0],
        make_cycle("two-pass", 3).plans[1],
        prefill_plan(16),
    ):
        for expected, found in zip(
            *(run(int4_bundle, each.file, plan) for each in (derived, plain)), strict=True
        ):
            np.testing.assert_array_equal(found[:, :, :48], expected[:, :, :48])


def test_a_bundle_without_an_adapter_has_no_trunk_without_it(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    manifest = read_manifest(export_bundle(model, tmp_path / "bundle", lookahead=2))
    assert manifest.derived and all(each.lookahead_rows for each in manifest.derived)
    assert manifest.derived_trunk("cpu", ONE, lookahead_rows=False) == manifest.derived_trunk(
        "cpu", ONE
    )


def test_a_model_without_groups_keeps_its_rows(tmp_path: Path):
    model = make_model(tmp_path / "model", num_attention_heads=2, num_key_value_heads=2)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=2, weights="int4")
    portable, derived = graphs(bundle)
    assert queries(portable) == queries(derived) == {"Concat"}
    check_widths(bundle)


@pytest.mark.parametrize(
    "plan", [*make_cycle("fused", 3).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)]
)
@pytest.mark.parametrize("batch", [1, 2])
def test_it_computes_what_the_portable_trunk_does(int4_bundle: Path, plan: Plan, batch: int):
    files = ("trunk.onnx", "trunk.cpu.onnx")
    portable, derived = (run(int4_bundle, file, plan, batch, exact=True) for file in files)
    for expected, found in zip(portable, derived, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_widths_batches_and_capacities_agree_bit_for_bit(int4_bundle: Path):
    check_widths(int4_bundle)


def check_widths(bundle: Path) -> None:
    alone = run(bundle, "trunk.cpu.onnx", make_cycle("ar", 0).plans[0])[0][0, 0]
    for plan in (*make_cycle("fused", 2).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)):
        for batch in (1, 2):
            for capacity in (64, 128, 320):
                logits = run(bundle, "trunk.cpu.onnx", plan, batch, capacity)[0]
                assert np.array_equal(logits[0, 0], alone), (plan.name, batch, capacity)


@pytest.fixture(scope="module")
def w8a8_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("w8a8")


@pytest.mark.parametrize("slots", [ONE, BATCHES])
def test_every_pair_around_8_bit_activations_is_fused(
    w8a8_bundle: Path, slots: int, tmp_path: Path
):
    """An int8 pair around zero, which TensorRT wants, is none that ONNX Runtime fuses: uint8 around
    128 is."""
    _, derived = graphs(w8a8_bundle, slots)
    optimized = optimize(
        w8a8_bundle / read_manifest(w8a8_bundle).trunk_file("cpu", slots), tmp_path
    )
    restored = {node.output[0] for node in derived.node if node.op_type == "DequantizeLinear"}
    products = [
        node for node in derived.node if node.op_type == "MatMul" and {*node.input} <= restored
    ]
    assert count(optimized, "MatMulIntegerToFloat") == len(products) > 0
    assert not count(optimized, "DequantizeLinear")


@pytest.mark.parametrize("slots", [ONE, BATCHES])
def test_the_adapter_reads_the_codes_of_its_layer(w8a8_bundle: Path, slots: int, tmp_path: Path):
    """No row is rounded a second time; the codes of the look-ahead rows go from a Gather straight
    to a product."""
    portable, derived = graphs(w8a8_bundle, slots)
    model = read_manifest(w8a8_bundle).model
    assert model.quantization is not None
    adapted = ("o_proj", "down_proj")
    places = 2 * model.layers - sum(
        name.endswith(adapted) for name in model.quantization.weight_only
    )
    assert count(portable, "QuantizeLinear") - count(derived, "QuantizeLinear") == places > 0
    optimized = optimize(
        w8a8_bundle / read_manifest(w8a8_bundle).trunk_file("cpu", slots), tmp_path
    )
    makers = {name: node.op_type for node in optimized.node for name in node.output}
    products = [node for node in optimized.node if node.op_type == "MatMulIntegerToFloat"]
    assert sum(makers[node.input[0]] == "Gather" for node in products) == places


def test_8_bit_widths_agree_bit_for_bit(w8a8_bundle: Path):
    check_widths(w8a8_bundle)


@pytest.mark.parametrize("file", ["trunk.cpu.onnx", "trunk.cpu.one.onnx"])
def test_lookahead_rows_are_the_same_bits_in_every_group(w8a8_bundle: Path, file: str):
    """A longer group begins with the rows of a shorter one."""
    longest = run(w8a8_bundle, file, make_cycle("two-pass", 3).plans[0])[0][0]
    for length in (1, 2):
        group = run(w8a8_bundle, file, make_cycle("two-pass", length).plans[0])[0][0]
        np.testing.assert_array_equal(group, longest[: length + 1])


def optimize(file: Path, directory: Path) -> onnx.GraphProto:
    """The graph as ONNX Runtime runs it."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return onnx.load(directory / "optimized.onnx", load_external_data=False).graph
