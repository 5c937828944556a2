"""Traces one decoder layer of each kind and copies its nodes for the others: it saves seconds.

While the model is traced, the other layers return their input unchanged. A marker node before and
one after every traced layer show where its nodes are. `repeat_layers` adds the copies and removes
the markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch.onnx.ops import symbolic
from transformers import PreTrainedModel

from pass_exporter.model.adapter import Adapter
from pass_runtime.bundle.tensors import PAST, PRESENT

BEGIN, END = "Begin", "End"
MARKER_DOMAIN = "pass.layers"
LAYERS_PREFIX = "model.model.layers"
"""The prefix of names of the decoder's layers in the trunk."""
CACHE_PARTS = ("key", "value")
"""The tensors of a layer's cache."""
COMPARED_TYPES = (bool, int, float, str, tuple, type(None))
"""A module's attributes of these types are its settings. Layers of one kind have equal settings."""


def first_of_kind(model: PreTrainedModel, adapter: Adapter | None) -> list[int]:
    """Return for every decoder layer the index of the first layer of its kind.

    Layers of one kind have equal module types, settings, weight shapes (the adapter's too) and
    types of masks.
    """
    seen: dict[str, int] = {}
    masks = getattr(model.config, "layer_types", None) or [None] * len(model.model.layers)
    kinds = []
    for index, layer in enumerate(model.model.layers):
        settings = [
            (name, type(module), _settings(module)) for name, module in layer.named_modules()
        ]
        shapes = [
            (key, tensor.shape) for key, (_, tensor) in _weights(model, adapter, index).items()
        ]
        kinds.append(seen.setdefault(repr((masks[index], settings, shapes)), index))
    return kinds


def _settings(module: torch.nn.Module) -> list[tuple[str, Any]]:
    plain = (
        (name, value) for name, value in vars(module).items() if isinstance(value, COMPARED_TYPES)
    )
    return sorted((name, value) for name, value in plain if name != "layer_idx")


def _weights(
    model: PreTrainedModel, adapter: Adapter | None, layer: int
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the weights of a layer, its adapter's included: name in the layer -> (name in the
    trunk, weight)."""
    found = {
        key: (f"{LAYERS_PREFIX}.{layer}.{key}", weight)
        for key, weight in model.model.layers[layer].named_parameters()
    }
    if adapter is not None:
        prefix = f"layers.{layer}."
        for index, (site, *factors) in enumerate(
            zip(adapter.names, adapter.lora_A, adapter.lora_B, strict=True)
        ):
            if site.startswith(prefix):
                for part, factor in zip(("lora_A", "lora_B"), factors, strict=True):
                    found[f"{site.removeprefix(prefix)}.{part}"] = (
                        f"adapter.{part}.{index}",
                        factor,
                    )
    return found


@contextmanager
def marked_layers(model: PreTrainedModel, kinds: Sequence[int]) -> Iterator[None]:
    """Within the block, the first layer of a kind has markers, and the others do nothing."""
    layers = list(model.model.layers)
    for index, layer in enumerate(layers):
        layer.forward = _between_marks(index, layer.forward) if kinds[index] == index else _identity
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _identity(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def _between_marks(index: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def mark(x: torch.Tensor, name: str) -> torch.Tensor:
        return symbolic(
            f"{MARKER_DOMAIN}::{name}",
            (x,),
            {"layer": index},
            dtype=x.dtype,
            shape=x.shape,
            version=1,
        )

    def marked(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        return mark(forward(mark(hidden_states, BEGIN), *arguments, **named), END)

    return marked


LayerInputs = dict[str, ir.Value]
"""The graph inputs and initializers that only one layer reads: weights by name, and cache."""


@dataclass(frozen=True)
class _Traced:
    """A traced layer: its nodes, the hidden rows before and after, and what it alone reads."""

    nodes: list[ir.Node]
    entry: ir.Value
    result: ir.Value
    own: LayerInputs


def repeat_layers(
    graph: ir.Graph, model: PreTrainedModel, adapter: Adapter | None, kinds: Sequence[int]
) -> None:
    """Add the skipped layers to a graph traced in `marked_layers`, as copies of the first of a
    kind.

    The copies' graph inputs and outputs (past_key.i and so on) come after those of the traced
    layers.
    """
    marks = [node for node in graph if node.domain == MARKER_DOMAIN]
    begins, ends = (
        {_layer_of(node): node for node in marks if node.op_type == kind} for kind in (BEGIN, END)
    )
    traced, outputs = dict[int, _Traced](), {str(value.name): value for value in graph.outputs}
    hidden, last = begins[0].inputs[0], begins[0]
    assert hidden is not None
    for index, kind in enumerate(kinds):
        if index == kind:
            last, result = ends[index], ends[index].inputs[0]
            assert result is not None
            own = _inputs_of_traced(graph, model, adapter, index)
            nodes = _between(graph, begins[index], last, own)
            begins[index].outputs[0].replace_all_uses_with(hidden)
            traced[index] = _Traced(nodes, hidden, result, own)
            hidden = result
            continue
        layer = traced[kind]
        own = _inputs_of_copy(graph, model, adapter, index, layer.own)
        values = {layer.entry: hidden} | {value: own[name] for name, value in layer.own.items()}
        copies = [_copy(node, values, index) for node in layer.nodes]
        graph.insert_after(last, copies)
        last, hidden = copies[-1], values[layer.result]
        for part in CACHE_PARTS:
            present = values[outputs[f"{PRESENT}{part}.{kind}"]]
            present.name = f"{PRESENT}{part}.{index}"
            graph.outputs.append(present)
    ends[max(traced)].outputs[0].replace_all_uses_with(hidden)
    graph.remove(marks, safe=True)
    del graph.opset_imports[MARKER_DOMAIN]


def _layer_of(mark: ir.Node) -> int:
    return mark.attributes["layer"].as_int()


def _between(graph: ir.Graph, begin: ir.Node, end: ir.Node, own: LayerInputs) -> list[ir.Node]:
    """Return the nodes between the markers that depend on the layer's input rows or own tensors.

    The other nodes there compute values that all layers share.
    """
    depending, found = {begin.outputs[0], *own.values()}, []
    nodes = list(graph)
    for node in nodes[nodes.index(begin) + 1 : nodes.index(end)]:
        if not depending.isdisjoint(node.inputs):
            found.append(node)
            depending.update(node.outputs)
    return found


def _copy(node: ir.Node, values: dict[ir.Value, ir.Value], layer: int) -> ir.Node:
    """Copy a node for another layer. values: the copies of the first layer's values, to which those
    of the outputs are added; a value without a copy is shared by all layers."""
    inputs = [None if value is None else values.get(value, value) for value in node.inputs]
    outputs = [
        ir.Value(name=f"{old.name}.{layer}", shape=old.shape, type=old.type) for old in node.outputs
    ]
    values.update(zip(node.outputs, outputs, strict=True))
    return ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs
    )


def _inputs_of_traced(
    graph: ir.Graph, model: PreTrainedModel, adapter: Adapter | None, layer: int
) -> LayerInputs:
    names = {
        key: name
        for key, (name, _) in _weights(model, adapter, layer).items()
        if name in graph.initializers
    }
    cache = {value.name: value for value in graph.inputs}
    past = {f"{PAST}{part}": cache[f"{PAST}{part}.{layer}"] for part in CACHE_PARTS}
    return past | {key: graph.initializers[name] for key, name in names.items()}


def _inputs_of_copy(
    graph: ir.Graph, model: PreTrainedModel, adapter: Adapter | None, layer: int, like: LayerInputs
) -> LayerInputs:
    """Add to the graph the tensors that a copied layer reads in place of those in `like`."""
    weights, found = _weights(model, adapter, layer), {}
    for key, value in like.items():
        name, tensor = weights.get(key, (f"{key}.{layer}", None))
        found[key] = ir.Value(name=name, shape=value.shape, type=value.type)
        if tensor is None:
            graph.inputs.append(found[key])
        else:
            found[key].const_value = ir.tensor_adapters.TorchTensor(tensor.detach(), name)
            graph.register_initializer(found[key])
    return found
