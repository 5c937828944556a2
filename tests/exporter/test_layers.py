"""The trace of a trunk runs one decoder layer of each kind, and copies it for the other layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import make_model
from pass_exporter.checks.torch_cases import torch_cases
from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.load import load_model
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.model.registry import resolve
from pass_exporter.trunk import trace
from pass_exporter.trunk.graph import save
from pass_exporter.trunk.layers import first_of_kind, marked_layers
from pass_runtime.backends.ort.session import open_session
from pass_runtime.bundle.tensors import PRESENT, cache_names, trunk_shapes
from traced import EXPORT
from trunk_feeds import trunk_feed

ADAPTED_LAYERS = (
    "layers.1.mlp.down_proj",
    "layers.3.mlp.down_proj",
    "layers.3.self_attn.o_proj",
    "layers.4.mlp.down_proj",
)
LAYERS = 6
KINDS = [0, 1, 0, 3, 1, 0]
"""For each decoder layer, the first layer of the same kind: with an adapter for the same layers."""


def model_and_adapter(directory: Path) -> tuple[torch.nn.Module, Adapter]:
    path = make_model(directory / "model", num_hidden_layers=LAYERS)
    model = load_model(resolve(str(path)), "fp32").model
    random, layers = torch.Generator().manual_seed(0), linear_layers(model)

    def factors(layer: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(4, layer.in_features, generator=random)
        return a, torch.randn(layer.out_features, 4, generator=random)

    return model, Adapter({name: factors(layers[name]) for name in ADAPTED_LAYERS})


def test_kinds_differ_by_adapters(tmp_path: Path):
    model, adapter = model_and_adapter(tmp_path)
    assert first_of_kind(model, adapter) == KINDS
    assert first_of_kind(model, None) == [0] * LAYERS


def test_kinds_differ_by_shapes_settings_and_masks(tmp_path: Path):
    model, _ = model_and_adapter(tmp_path)
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(7, 64))
    layers[2].self_attn.scaling = 0.5
    model.config.layer_types = (
        ["full_attention"] * 3 + ["sliding_attention"] * 2 + ["full_attention"]
    )
    assert first_of_kind(model, None) == [0, 1, 2, 3, 3, 0]


def test_only_one_layer_of_a_kind_computes(tmp_path: Path):
    model, adapter = model_and_adapter(tmp_path)
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    with marked_layers(model, first_of_kind(model, adapter)), torch.no_grad():
        model(input_ids=torch.arange(3)[None])
    assert ran == [0, 1, 3]
    model(input_ids=torch.arange(3)[None])
    assert ran[3:] == list(range(LAYERS))  # the model is as before


@pytest.mark.slow
def test_a_trunk_with_copied_layers_equals_one_whose_layers_are_all_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.onnx, "export", EXPORT)  # not the traces that other tests made
    model, adapter = model_and_adapter(tmp_path)
    embeddings = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    lookahead_weights = LookaheadWeights(embeddings, trained=True, source="random", adapter=adapter)
    case = next(
        case for case in torch_cases(model, lookahead_weights) if len(case.window.lookahead_rows)
    )
    padding = ((0, 0), (0, 0), (0, 64 - case.length), (0, 0))
    past = [np.pad(tensor, padding) for tensor in case.past]
    trunks = []
    for name, kinds in (("copied", KINDS), ("traced", list(range(LAYERS)))):
        monkeypatch.setattr(trace, "first_of_kind", lambda *_, kinds=kinds: kinds)
        graph, parts = trace.trace_trunk(model, lookahead_weights)
        outputs = [value.name for value in graph.graph.outputs]
        assert outputs == ["logits", *cache_names(PRESENT, LAYERS)]
        shapes = {
            value.name: str(value.shape) for value in (*graph.graph.inputs, *graph.graph.outputs)
        }
        assert shapes.keys() == trunk_shapes(LAYERS).keys() - {"hidden"}
        weights = {
            name: str(value.shape)
            for name, value in graph.graph.initializers.items()
            if value.shape
        }
        operators = Counter(node.op_type for node in graph.graph)
        save(graph, tmp_path / f"{name}.onnx")
        session = open_session(tmp_path / f"{name}.onnx", "cpu")
        feed = trunk_feed(session, case.window, case.input_ids, [case.length], past)
        results = session.run(None, feed)
        trunks.append((operators, shapes, parts.keys(), sorted(weights.values()), results))
    (*copied, results), (*traced, expected) = trunks
    assert copied == traced
    assert all(np.array_equal(a, b) for a, b in zip(results, expected, strict=True))
    assert np.abs(results[0] - case.logits).max() < 1e-4 * np.abs(case.logits).max()
