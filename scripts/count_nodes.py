"""Counts the nodes that a pass runs in the graphs of a bundle.

    python scripts/count_nodes.py BUNDLE

A trunk's nodes are counted before the layers (`prelude`), in a layer without the adapter (`layer`),
in a place that the adapter changes (`place`), and after the layers (`end`). Nodes of constants
alone are left out, because ONNX Runtime computes them once. What it fuses itself when it opens a
graph does not show here.
"""

from __future__ import annotations

import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import onnx_ir as ir

NORMS = ("RMSNormalization", "SkipSimplifiedLayerNormalization")
KEYS, ADAPTER = "present_key.", "adapter.lora_A."
"""Prefixes of the outputs that tell layers apart, and of the adapter's first weights."""


@dataclass(frozen=True)
class TrunkNodes:
    """How many nodes a pass runs in a trunk, in all and by part."""

    total: int
    prelude: int
    layer: int
    place: int
    end: int


def count_trunk(file: Path) -> TrunkNodes:
    """Count the nodes of a trunk whose layers have the same nodes, two or more of them."""
    graph = ir.load(file).graph
    run = run_nodes(graph)
    layered = _readers(run, next(node for node in run if _begins_layer(node)))
    places = [
        _place(node)
        for node in run
        if any(str(each.name).startswith(ADAPTER) for each in node.inputs if each)
    ]
    own = layered.difference(*places)
    keys = [_sources(value) & own for value in graph.outputs if str(value.name).startswith(KEYS)]
    layer = len(keys[1] - keys[0])
    return TrunkNodes(
        total=len(run),
        prelude=len(run) - len(layered.union(*places)),
        layer=layer,
        place=max(map(len, places), default=0),
        end=len(own) - len(keys) * layer,
    )


def run_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that do not compute with constants alone."""
    known = {*graph.initializers.values(), None}
    nodes = []
    for node in graph:
        if node.inputs and known.issuperset(node.inputs):
            known.update(node.outputs)
        else:
            nodes.append(node)
    return nodes


def _begins_layer(node: ir.Node) -> bool:
    """Whether a node is a norm or a product with weights; before the first are no layers."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    return node.op_type in NORMS or (weight is not None and weight.is_initializer())


def _readers(nodes: list[ir.Node], first: ir.Node) -> set[ir.Node]:
    """`first` and all nodes that compute with its results."""
    found, values = {first}, {*first.outputs}
    for node in nodes:
        if not values.isdisjoint(node.inputs):
            found.add(node)
            values.update(node.outputs)
    return found


def _sources(value: ir.Value) -> set[ir.Node]:
    """Return all nodes that `value` is computed by."""
    found: set[ir.Node] = set()
    waiting = [value.producer()]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [each.producer() for each in node.inputs if each is not None]
    return found


def _place(product: ir.Node) -> set[ir.Node]:
    """Return the adapter's nodes from the product with A (or its Gather) to the addition."""
    source = None if product.inputs[0] is None else product.inputs[0].producer()
    found = {product} if source is None or source.op_type != "Gather" else {product, source}
    value = product.outputs[0]
    while len(uses := list(value.uses())) == 1:
        node = uses[0].node
        found.add(node)
        others = [
            each.producer()
            for at, each in enumerate(node.inputs)
            if each is not None and at != uses[0].idx
        ]
        if any(each is not None and each.op_type == "MatMul" for each in others):
            break
        value = node.outputs[0]
    return found


def main() -> None:
    bundle = Path(sys.argv[1])
    print(f"{'trunk':28}", *(f"{field.name:>7}" for field in fields(TrunkNodes)))
    for file in sorted(bundle.glob("trunk*.onnx")):
        print(f"{file.name:28}", *(f"{number:7}" for number in astuple(count_trunk(file))))
    for file in sorted(bundle.glob("tail*.onnx")):
        print(f"{file.name:28}", f"{len(run_nodes(ir.load(file).graph)):7}")


if __name__ == "__main__":
    main()
