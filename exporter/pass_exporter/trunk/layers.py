"""Traces one decoder layer of each kind and copies its nodes for the others: 30 layers took 12
seconds in place of 67. Markers before and after every traced layer show its nodes; the other layers
return their input."""

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
from pass_exporter.trunk.graph import operand
from pass_runtime.bundle.tensors import PAST, PRESENT

BEGIN, END = "Begin", "End"
MARKER_DOMAIN = "pass.layers"
LAYERS_PREFIX = "model.model.layers"
"""The prefix of the names that weights of decoder layers have in the trunk."""
CACHE_PARTS = ("key", "value")
COMPARED_TYPES = (bool, int, float, str, tuple, type(None))
"""Attributes of these types are a module's settings."""


def first_of_kind(model: PreTrainedModel, adapter: Adapter | None) -> list[int]:
    """Return for every decoder layer the first layer of its kind, with equal module types,
    settings, weight shapes (the adapter's too) and masks."""
    first_index: dict[str, int] = {}  # by a description of the kind
    masks = getattr(model.config, "layer_types", None) or [None] * len(model.model.layers)
    originals = []
    for index, layer in enumerate(model.model.layers):
        settings = [
            (name, type(module), _settings(module)) for name, module in layer.named_modules()
        ]
        shapes = [
            (key, tensor.shape) for key, (_, tensor) in _weights(model, adapter, index).items()
        ]
        originals.append(first_index.setdefault(repr((masks[index], settings, shapes)), index))
    return originals


def _settings(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, COMPARED_TYPES) and name != "layer_idx"
    )


def _weights(
    model: PreTrainedModel, adapter: Adapter | None, layer: int
) -> dict[str, tuple[str, torch.Tensor]]:
    """Return a layer's weights and their names in the trunk, by their names in the layer."""
    weights = {
        key: (f"{LAYERS_PREFIX}.{layer}.{key}", weight)
        for key, weight in model.model.layers[layer].named_parameters()
    }
    if adapter is not None:
        prefix = f"layers.{layer}."
        for index, (name, *factors) in enumerate(
            zip(adapter.names, adapter.lora_A, adapter.lora_B, strict=True)
        ):
            if name.startswith(prefix):
                for part, factor in zip(("lora_A", "lora_B"), factors, strict=True):
                    weights[f"{name.removeprefix(prefix)}.{part}"] = (
                        f"adapter.{part}.{index}",
                        factor,
                    )
    return weights


@contextmanager
def marked_layers(model: PreTrainedModel, originals: Sequence[int]) -> Iterator[None]:
    """Mark the layers to trace within the block, and let the others do nothing. originals: as
    `first_of_kind` returns them."""
    layers = list(model.model.layers)
    for index, layer in enumerate(layers):
        is_traced = originals[index] == index
        layer.forward = _between_marks(index, layer.forward) if is_traced else lambda x, *_, **__: x
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


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
"""What only one layer reads: its weights, by name in the layer, and its part of the KV cache."""


@dataclass(frozen=True)
class _Traced:
    nodes: list[ir.Node]
    entry: ir.Value
    result: ir.Value
    own_inputs: LayerInputs


def repeat_layers(
    graph: ir.Graph, model: PreTrainedModel, adapter: Adapter | None, originals: Sequence[int]
) -> None:
    """Add the skipped layers to a graph that was traced in `marked_layers`. Their graph inputs and
    outputs come after those of the traced layers."""
    marks = [node for node in graph if node.domain == MARKER_DOMAIN]
    begins = {_layer_of(node): node for node in marks if node.op_type == BEGIN}
    ends = {_layer_of(node): node for node in marks if node.op_type == END}
    traced, outputs = dict[int, _Traced](), {str(value.name): value for value in graph.outputs}
    # The rows after the layers so far, and the last node of these layers.
    hidden, last = operand(begins[0], 0), begins[0]
    for index, original in enumerate(originals):
        if index == original:
            last, result = ends[index], operand(ends[index], 0)
            own_inputs = _inputs_of_traced(graph, model, adapter, index)
            nodes = _between(graph, begins[index], last, own_inputs)
            begins[index].outputs[0].replace_all_uses_with(hidden)
            traced[index] = _Traced(nodes, hidden, result, own_inputs)
            hidden = result
            continue
        layer = traced[original]
        own_inputs = _inputs_of_copy(graph, model, adapter, index, layer.own_inputs)
        values = {value: own_inputs[name] for name, value in layer.own_inputs.items()}
        values[layer.entry] = hidden
        copies = [_copy(node, values, index) for node in layer.nodes]
        graph.insert_after(last, copies)
        last, hidden = copies[-1], values[layer.result]
        for part in CACHE_PARTS:
            present = values[outputs[f"{PRESENT}{part}.{original}"]]
            present.name = f"{PRESENT}{part}.{index}"
            graph.outputs.append(present)
    # What follows the layers reads the last traced layer; it must read the last layer of all.
    ends[max(traced)].outputs[0].replace_all_uses_with(hidden)
    graph.remove(marks, safe=True)
    del graph.opset_imports[MARKER_DOMAIN]


def _layer_of(mark: ir.Node) -> int:
    return mark.attributes["layer"].as_int()


def _between(
    graph: ir.Graph, begin: ir.Node, end: ir.Node, own_inputs: LayerInputs
) -> list[ir.Node]:
    """Return the nodes between the markers that depend on the layer's rows or own inputs. Others
    are shared by all layers."""
    depending, layer_nodes = {begin.outputs[0], *own_inputs.values()}, []
    nodes = list(graph)
    for node in nodes[nodes.index(begin) + 1 : nodes.index(end)]:
        if not depending.isdisjoint(node.inputs):
            layer_nodes.append(node)
            depending.update(node.outputs)
    return layer_nodes


def _copy(node: ir.Node, values: dict[ir.Value, ir.Value], layer: int) -> ir.Node:
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
    weights, inputs = _weights(model, adapter, layer), {}
    for key, value in like.items():
        name, tensor = weights.get(key, (f"{key}.{layer}", None))  # None: a part of the cache
        inputs[key] = ir.Value(name=name, shape=value.shape, type=value.type)
        if tensor is None:
            graph.inputs.append(inputs[key])
        else:
            inputs[key].const_value = ir.tensor_adapters.TorchTensor(tensor.detach(), name)
            graph.register_initializer(inputs[key])
    return inputs
