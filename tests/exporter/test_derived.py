"""The trunks for CPUs, which are derived from the portable trunk, trunk.onnx: their operators, and
that their results are those of the portable trunk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from trunk_graphs import LENGTHS, check_widths, count, load_graph, optimized_graph, run_trunk

from conftest import export_bundle, make_model
from pass_runtime.bundle.plan import Plan, make_cycle, prefill_plan
from pass_runtime.bundle.read import read_manifest

PLANS = [*make_cycle("fused", 3).plans, *make_cycle("two-pass", 2).plans, prefill_plan(16)]


@pytest.fixture(scope="module")
def int4_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("int4")


ONE, BATCHES = 1, 2
"""Numbers of slots. A session with one slot runs another trunk than a session with more."""
for_both_trunks = pytest.mark.parametrize("slots", [ONE, BATCHES])


def graphs(bundle: Path, slots: int = BATCHES) -> tuple[onnx.GraphProto, onnx.GraphProto]:
    """Return the portable trunk, and the trunk that a CPU session with `slots` slots runs."""
    manifest = read_manifest(bundle)
    files = (manifest.trunk.file, manifest.trunk_file("cpu", slots))
    portable, derived = (onnx.load(bundle / file, load_external_data=False) for file in files)
    assert portable.metadata_props == derived.metadata_props
    return portable.graph, derived.graph


def query_operators(graph: onnx.GraphProto) -> set[str]:
    """Return the types of the nodes whose outputs are the queries of attention."""
    makers = {name: node.op_type for node in graph.node for name in node.output}
    return {makers[node.input[0]] for node in graph.node if node.op_type == "Attention"}


@for_both_trunks
def test_derived_trunks_read_the_weights_of_the_portable_trunk(int4_bundle: Path, slots: int):
    portable, derived = (
        {tensor.name: tensor.external_data for tensor in graph.initializer if tensor.external_data}
        for graph in graphs(int4_bundle, slots)
    )
    assert derived == portable
    assert not list(int4_bundle.glob("trunk.cpu*.data"))


def test_the_query_heads_of_a_key_head_are_rows_of_one_product(int4_bundle: Path):
    """ONNX Runtime rounds a product of a single row in another way than one of several rows, so
    bits would depend on the plan. The portable trunk adds a row instead (Concat)."""
    portable, derived = graphs(int4_bundle)
    layers = read_manifest(int4_bundle).model.layers
    assert query_operators(portable) == {"Concat"} and query_operators(derived) == {"Reshape"}
    assert [count(each, "RotaryEmbedding") for each in (portable, derived)] == [2 * layers, layers]
    assert count(derived, "Attention") == count(portable, "Attention") == layers


def test_the_trunk_for_one_sequence_has_one_node_for_a_layers_attention(int4_bundle: Path):
    portable, derived = graphs(int4_bundle, ONE)
    assert count(derived, "GroupQueryAttention") == count(portable, "Attention") > 0
    assert not any(
        count(derived, op) for op in ("Attention", "TensorScatter", "RotaryEmbedding", "Split")
    )


@pytest.mark.parametrize("plan", PLANS)
def test_the_trunk_for_one_sequence_computes_what_the_portable_trunk_does(
    int4_bundle: Path, plan: Plan
):
    """And the root's bits are the same for every width and capacity. A capacity of 41 just holds
    some of the windows and a spare entry."""
    expected, actual = (
        run_trunk(int4_bundle, file, plan, exact=True)
        for file in ("trunk.onnx", "trunk.cpu.one.onnx")
    )
    end = LENGTHS[0] + plan.width
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5 * np.abs(expected[0]).max())
    for derived, portable in zip(actual[1:], expected[1:], strict=True):  # the cache
        np.testing.assert_allclose(
            derived[:, :, :end], portable[:, :, :end], atol=1e-5 * np.abs(portable).max()
        )
    ar = make_cycle("ar", 0).plans[0]
    root = run_trunk(int4_bundle, "trunk.cpu.one.onnx", ar, capacity=41)[0][0, 0]
    for each, capacity in product((ar, plan), (41, 64, 320)):
        logits = run_trunk(int4_bundle, "trunk.cpu.one.onnx", each, capacity=capacity)[0]
        assert np.array_equal(logits[0, 0], root)


@for_both_trunks
def test_residuals_are_added_and_normalized_in_one_node(int4_bundle: Path, slots: int):
    portable, derived = graphs(int4_bundle, slots)
    layers = read_manifest(int4_bundle).model.layers
    assert count(derived, "SkipSimplifiedLayerNormalization") == 2 * layers
    assert count(portable, "RMSNormalization") == 2 * layers + 1
    assert count(derived, "RMSNormalization") == 1  # of the embeddings, to which nothing is added


@for_both_trunks
def test_the_trunk_without_an_adapter_computes_the_same_bits(int4_bundle: Path, slots: int):
    """A session runs it for passes without look-ahead rows."""
    manifest = read_manifest(int4_bundle)
    derived, plain = (
        manifest.derived_trunk("cpu", slots, lookahead_rows=rows) for rows in (True, False)
    )
    assert derived is not None and plain is not None and derived.batch == plain.batch
    small, large = (load_graph(int4_bundle / each.file) for each in (plain, derived))
    assert count(large, "ScatterND") == 2 * manifest.model.layers and not count(small, "ScatterND")
    verify = make_cycle("two-pass", 3).plans[1]
    for plan in (make_cycle("ar", 0).plans[0], verify, prefill_plan(16)):
        results = (run_trunk(int4_bundle, each.file, plan) for each in (derived, plain))
        for expected, actual in zip(*results, strict=True):
            # Of logits, the first 48 of each row; of the cache, 48 entries, which hold the window.
            np.testing.assert_array_equal(actual[:, :, :48], expected[:, :, :48])


@pytest.mark.slow
def test_a_bundle_without_an_adapter_has_one_trunk_for_all_passes(tmp_path: Path):
    model = make_model(tmp_path / "model", num_hidden_layers=1)
    manifest = read_manifest(export_bundle(model, tmp_path / "bundle", lookahead=2))
    assert manifest.derived and all(each.lookahead_rows for each in manifest.derived)
    chosen = [manifest.derived_trunk("cpu", ONE, lookahead_rows=rows) for rows in (True, False)]
    assert chosen[0] == chosen[1]


@pytest.mark.slow
def test_the_queries_of_a_model_with_as_many_key_heads_as_query_heads_are_not_rewritten(
    tmp_path: Path,
):
    model = make_model(tmp_path / "model", num_attention_heads=2, num_key_value_heads=2)
    bundle = export_bundle(model, tmp_path / "bundle", lookahead=2, weights="int4")
    portable, derived = graphs(bundle)
    assert query_operators(portable) == query_operators(derived) == {"Concat"}
    check_widths(bundle)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [1, 2])
def test_the_trunk_for_batches_computes_what_the_portable_trunk_does(
    int4_bundle: Path, plan: Plan, batch: int
):
    files = ("trunk.onnx", "trunk.cpu.onnx")
    portable, derived = (run_trunk(int4_bundle, file, plan, batch, exact=True) for file in files)
    for expected, actual in zip(portable, derived, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "w8a8"])
def test_widths_batches_and_capacities_do_not_change_bits(
    in_format: Callable[[str], Path], weights: str
):
    check_widths(in_format(weights))


@pytest.fixture(scope="module")
def w8a8_bundle(in_format: Callable[[str], Path]) -> Path:
    return in_format("w8a8")


@for_both_trunks
def test_every_product_of_8_bit_activations_is_fused(w8a8_bundle: Path, slots: int, tmp_path: Path):
    """ONNX Runtime fuses products of codes in uint8 around 128, which the derived trunks have. The
    portable trunk has int8 around 0, as TensorRT needs."""
    _, derived = graphs(w8a8_bundle, slots)
    file = read_manifest(w8a8_bundle).trunk_file("cpu", slots)
    optimized = optimized_graph(w8a8_bundle / file, tmp_path)
    restored = {node.output[0] for node in derived.node if node.op_type == "DequantizeLinear"}
    products = [
        node for node in derived.node if node.op_type == "MatMul" and {*node.input} <= restored
    ]
    assert count(optimized, "MatMulIntegerToFloat") == len(products) > 0
    assert not count(optimized, "DequantizeLinear")


@for_both_trunks
def test_the_adapter_reads_the_codes_of_its_layer(w8a8_bundle: Path, slots: int, tmp_path: Path):
    """A Gather selects the codes of the look-ahead rows. The portable trunk rounds these rows once
    more for the adapter, at each of the adapter's places whose layer has 8-bit activations."""
    portable, derived = graphs(w8a8_bundle, slots)
    model = read_manifest(w8a8_bundle).model
    assert model.quantization is not None
    adapted = ("o_proj", "down_proj")
    places = 2 * model.layers - sum(
        name.endswith(adapted) for name in model.quantization.weight_only
    )
    assert count(portable, "QuantizeLinear") - count(derived, "QuantizeLinear") == places > 0
    file = read_manifest(w8a8_bundle).trunk_file("cpu", slots)
    optimized = optimized_graph(w8a8_bundle / file, tmp_path)
    makers = {name: node.op_type for node in optimized.node for name in node.output}
    products = [node for node in optimized.node if node.op_type == "MatMulIntegerToFloat"]
    assert sum(makers[node.input[0]] == "Gather" for node in products) == places


@pytest.mark.parametrize("file", ["trunk.cpu.onnx", "trunk.cpu.one.onnx"])
def test_lookahead_rows_are_the_same_bits_in_every_group(w8a8_bundle: Path, file: str):
    """A shorter group has the bits of the first rows of a longer group."""
    longest = run_trunk(w8a8_bundle, file, make_cycle("two-pass", 3).plans[0])[0][0]
    for length in (1, 2):
        group = run_trunk(w8a8_bundle, file, make_cycle("two-pass", length).plans[0])[0][0]
        np.testing.assert_array_equal(group, longest[: length + 1])
