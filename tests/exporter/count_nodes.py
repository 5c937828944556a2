"""Counts the nodes that a pass runs in a trunk. Nodes that compute with constants alone are left
out: ONNX Runtime runs them once, when it opens the graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

NORMS = ("RMSNormalization", "SkipSimplifiedLayerNormalization", "AddNorm")
KEYS, ADAPTER = "present_key.", "adapter.lora_A."
"""How the names of a layer's output for the KV cache, and of the adapter's matrices A, begin."""


@dataclass(frozen=True)
class TrunkNodes:
    """How many nodes a pass runs: in total, before the layers, in a layer without the adapter, in a
    product that the adapter changes, and after the layers."""

    total: int
    prelude: int
    layer: int
    place: int
    end: int


def count_trunk(file: Path) -> TrunkNodes:
    """Count the nodes of a trunk whose layers, two or more, all have the same nodes."""
    graph = ir.load(file).graph
    nodes = run_nodes(graph)
    layers_and_end = _readers(nodes, next(node for node in nodes if _begins_layer(node)))
    places = [
        _place(node)
        for node in nodes
        if any(str(each.name).startswith(ADAPTER) for each in node.inputs if each)
    ]
    plain = layers_and_end.difference(*places)
    # The second layer's keys depend on the first layer's nodes, and on as many of its own.
    keys = [_sources(value) & plain for value in graph.outputs if str(value.name).startswith(KEYS)]
    layer = len(keys[1] - keys[0])
    return TrunkNodes(
        total=len(nodes),
        prelude=len(nodes) - len(layers_and_end.union(*places)),
        layer=layer,
        place=max(map(len, places), default=0),
        end=len(plain) - len(keys) * layer,
    )


def run_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that do not compute with constants alone."""
    constants = {*graph.initializers.values(), None}
    nodes = []
    for node in graph:
        if node.inputs and constants.issuperset(node.inputs):
            constants.update(node.outputs)
        else:
            nodes.append(node)
    return nodes


def _begins_layer(node: ir.Node) -> bool:
    """Return whether a node is a norm or a product with weights, with which each layer begins."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    return node.op_type in NORMS or (weight is not None and weight.is_initializer())


def _readers(nodes: list[ir.Node], first: ir.Node) -> set[ir.Node]:
    """Return `first` and all nodes that compute with its results."""
    readers, values = {first}, {*first.outputs}
    for node in nodes:
        if not values.isdisjoint(node.inputs):
            readers.add(node)
            values.update(node.outputs)
    return readers


def _sources(value: ir.Value) -> set[ir.Node]:
    """Return all nodes that `value` is computed by."""
    sources: set[ir.Node] = set()
    waiting = [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in sources:
            sources.add(node)
            waiting += [each.producer() for each in node.inputs if each is not None]
    return sources


def _place(product: ir.Node) -> set[ir.Node]:
    """Return the adapter's nodes in one place.

    They begin with the product with A, or the Gather of look-ahead rows before it, and end with the
    addition to the result of the base model.
    """
    source = None if product.inputs[0] is None else product.inputs[0].producer()
    nodes = {product} if source is None or source.op_type != "Gather" else {product, source}
    value = product.outputs[0]
    while len(uses := list(value.uses())) == 1:
        node, own_index = uses[0].node, uses[0].idx
        nodes.add(node)
        others = [each for i, each in enumerate(node.inputs) if each is not None and i != own_index]
        producers = [each.producer() for each in others]
        if any(each is not None and each.op_type == "MatMul" for each in producers):
            break  # the addition: its other input is the base model's product
        value = node.outputs[0]
    return nodes
