"""The graphs of a bundle have operators that engines run, and nothing of the exporting machine."""

from __future__ import annotations

import getpass
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from checkpoints import load_path

from conftest import export_bundle, make_model
from pass_exporter.model.lookahead import mean_embedding
from pass_exporter.trunk.trace import trace_trunk

LAYERS = 2
HIDDEN, VOCAB = 64, 320
ATTENTION = "Attention RMSNormalization RotaryEmbedding TensorScatter MatMul Sigmoid Mul Add"
SHAPES = "Reshape Transpose Shape Unsqueeze Squeeze Slice Split Concat Cast Range"
MASK_AND_POSITIONS = "Sub Less GreaterOrEqual And Or Where Min Clip Gather Cos Sin"
ADAPTER_ROWS = "Expand ReduceSum"
OPERATORS = {*f"{ATTENTION} {SHAPES} {MASK_AND_POSITIONS} {ADAPTER_ROWS}".split()}
"""All operators that a trunk may have. GatherND and ScatterND cannot be captured as CUDA graphs;
NonZero, CumProd and If do not build in TensorRT-RTX."""


def graphs(bundle: Path) -> list[Path]:
    return sorted(bundle.glob("*.onnx"))


@pytest.fixture(scope="module")
def trunk(tiny_bundle: Path) -> onnx.ModelProto:
    return onnx.load(tiny_bundle / "trunk.onnx")


@pytest.fixture(scope="module")
def tied_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied")
    model = make_model(directory / "model", tie_word_embeddings=True)
    return export_bundle(model, directory / "bundle", lookahead=1)


def initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {tensor.name: tensor for tensor in model.graph.initializer}


def test_all_but_the_trunk_for_cpus_have_only_standard_operators_of_opset_24(tiny_bundle: Path):
    own = {"trunk.cpu.onnx": {"Embed", "AddNorm", "DenseProduct", "WindowAttention", "Gate"}}
    # Two trunks; a tail for each of three samplers of 21 windows: ar, copies of 8 and 16, draft,
    # verify and fused with 1 to 6 drafts; log-probabilities; logits processors.
    assert len(graphs(tiny_bundle)) == 2 + 3 * 21 + 2
    for path in graphs(tiny_bundle):
        model = onnx.load(path, load_external_data=False)
        if path.name in own:
            assert {node.op_type for node in model.graph.node if node.domain} == own[path.name]
            continue
        assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 24)], (
            path.name
        )
        assert {node.domain for node in model.graph.node} == {""}, path.name
        assert len(model.functions) == 0, path.name


def test_every_graph_passes_the_full_check(tiny_bundle: Path):
    for path in graphs(tiny_bundle):
        onnx.checker.check_model(path, full_check=True)


def test_the_trunk_has_no_other_and_no_more_operators_than_it_needs(trunk: onnx.ModelProto):
    counts = Counter(node.op_type for node in trunk.graph.node)
    assert set(counts) <= OPERATORS
    assert counts["Attention"] == LAYERS
    assert counts["TensorScatter"] == 2 * LAYERS
    assert counts["RotaryEmbedding"] == 2 * LAYERS
    assert counts["RMSNormalization"] == 2 * LAYERS + 1
    assert counts["MatMul"] == 5 * LAYERS + 1  # q, k and v are one product
    assert counts["Split"] == LAYERS
    assert counts["Cos"] == counts["Sin"] == 1  # once per pass, not in every layer
    masks = {node.input[3] for node in trunk.graph.node if node.op_type == "Attention"}
    assert len(masks) == 1


def test_attention_has_no_attribute_that_an_engine_ignores(trunk: onnx.ModelProto):
    for node in trunk.graph.node:
        if node.op_type == "Attention":
            assert [a.name for a in node.attribute] == ["scale"]
            assert len(node.input) == 4  # q, k, v, mask; no past, no nonpad_kv_seqlen
        if node.op_type == "TensorScatter":
            attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
            assert attributes == {"axis": -2, "mode": b"linear"}


def test_only_a_tensor_scatter_reads_and_writes_each_cache_tensor(trunk: onnx.ModelProto):
    for part in ("key", "value"):
        for layer in range(LAYERS):
            past, present = f"past_{part}.{layer}", f"present_{part}.{layer}"
            readers = [
                node for node in trunk.graph.node if past in node.input and node.op_type != "Shape"
            ]
            assert [node.op_type for node in readers] == ["TensorScatter"]
            assert readers[0].input[0] == past and list(readers[0].output) == [present]


def test_a_bundle_names_nothing_of_the_exporting_machine(tiny_bundle: Path, tiny_model: Path):
    machine = [Path.home(), Path(torch.__file__).parents[1], Path(__file__).parents[2]]
    machine += [tiny_bundle.parent, tiny_model.parent]
    words = [str(path).encode() for path in machine if str(path) != "/"]
    words += b"site-packages pass_exporter modeling_ .py stack_trace Traceback /tmp/".split()
    if (user := getpass.getuser()) != "root":
        words.append(user.encode())
    for path in (*graphs(tiny_bundle), tiny_bundle / "pass_config.json"):
        content = path.read_bytes()
        assert [word for word in words if word in content] == [], path.name


def test_graphs_have_no_metadata(tiny_bundle: Path):
    for path in graphs(tiny_bundle):
        model = onnx.load(path, load_external_data=False)
        assert not model.doc_string and not model.metadata_props
        values = (
            *model.graph.input,
            *model.graph.output,
            *model.graph.value_info,
            *model.graph.initializer,
        )
        for item in (model.graph, *model.graph.node, *values):
            assert not item.doc_string and len(item.metadata_props) == 0, f"{path.name}: {item}"


def test_weights_are_stored_in_the_layout_that_products_read(trunk: onnx.ModelProto):
    weights = initializers(trunk)
    for node in trunk.graph.node:
        if node.op_type == "Transpose":
            assert node.input[0] not in weights
        if node.op_type == "MatMul":
            assert node.input[1] in weights
    shapes = Counter(
        tuple(weights[n.input[1]].dims) for n in trunk.graph.node if n.op_type == "MatMul"
    )
    qkv = (64, 64 + 32 + 32)
    assert shapes == {
        qkv: LAYERS,
        (64, 64): LAYERS,
        (64, 96): 2 * LAYERS,
        (96, 64): LAYERS,
        (64, 320): 1,
    }


def test_every_weight_of_a_product_names_the_models_weights_in_it(tiny_model: Path):
    model = load_path(tiny_model).model
    graph, parts = trace_trunk(model, mean_embedding(model, 1))
    by_name = {f"model.{name}": w.detach().numpy() for name, w in model.named_parameters()}
    weights = [node.inputs[1] for node in graph.graph if node.op_type == "MatMul"]
    for weight in weights:
        expected = np.concatenate([by_name[name] for name in parts[weight.name]]).T
        np.testing.assert_array_equal(weight.const_value.numpy(), expected)
    assert Counter(len(parts[weight.name]) for weight in weights) == {3: LAYERS, 1: 4 * LAYERS + 1}


def test_tied_weights_are_stored_once(tied_bundle: Path, tiny_bundle: Path):
    tied = onnx.load(tied_bundle / "trunk.onnx", load_external_data=False)
    tables = [t for t in tied.graph.initializer if sorted(t.dims) == sorted((VOCAB, HIDDEN))]
    assert len(tables) == 1
    readers = Counter(node.op_type for node in tied.graph.node if tables[0].name in node.input)
    assert readers == {"Gather": 1, "Transpose": 1}
    tied_size, size = (
        (bundle / "trunk.onnx.data").stat().st_size for bundle in (tied_bundle, tiny_bundle)
    )
    # The untied model has one more table of float32. Beside it, page alignment and five look-ahead
    # embeddings (L=6 in place of 1) make less than two pages.
    assert abs(size - tied_size - VOCAB * HIDDEN * 4) <= 2 * 4096


def test_tails_that_sample_read_the_noise_tables_from_one_file_and_others_read_none(tiny_bundle):
    end = (tiny_bundle / "tail.noise.data").stat().st_size
    spans_in_file = [("0", str(end // 2)), (str(end // 2), str(end // 2))]  # offset, length
    for path in tiny_bundle.glob("tail.*.onnx"):
        spans = []
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            entry = {item.key: item.value for item in tensor.external_data}
            if entry:
                assert entry["location"] == "tail.noise.data" and "noise_table" in tensor.name
                spans.append((entry["offset"], entry["length"]))
        samples = not path.name.endswith((".greedy.onnx", ".logprobs.onnx", ".processors.onnx"))
        assert sorted(spans) == (spans_in_file if samples else []), path.name
