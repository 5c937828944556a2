"""The trace of a trunk runs one decoder layer of each kind, and copies it for the other layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import load_path

from conftest import make_model
from pass_exporter.checks.torch_cases import torch_cases
from pass_exporter.model.adapter import Adapter, linear_layers
from pass_exporter.model.lookahead import LookaheadWeights
from pass_exporter.trunk.graph import save
from pass_exporter.trunk.layers import first_of_kind, marked_layers
from pass_exporter.trunk.trace import trace_trunk
from pass_runtime.backends.ort.session import open_session
from pass_runtime.bundle.tensors import PRESENT, cache_names
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
    model = load_path(path).model
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
def test_a_trunk_with_copied_layers_computes_what_torch_does(tmp_path: Path):
    model, adapter = model_and_adapter(tmp_path)
    embeddings = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    weights = LookaheadWeights(embeddings, trained=True, source="random", adapter=adapter)
    trunk, parts = trace_trunk(model, weights)
    assert [value.name for value in trunk.graph.outputs] == [
        "logits",
        *cache_names(PRESENT, LAYERS),
    ]
    linear = {name for names in parts.values() for name in names if name.startswith("model.model")}
    assert linear == {f"model.model.{name}.weight" for name in linear_layers(model)}
    save(trunk, tmp_path / "trunk.onnx")
    session = open_session(tmp_path / "trunk.onnx", "cpu")
    for case in torch_cases(model, weights):
        padding = ((0, 0), (0, 0), (0, 64 - case.length), (0, 0))
        past = [np.pad(tensor, padding) for tensor in case.past]
        feed = trunk_feed(session, case.window, case.input_ids, [case.length], past)
        logits, *_ = session.run(None, feed)
        assert np.abs(logits - case.logits).max() < 1e-4 * np.abs(case.logits).max()
