"""Runs a graph in pieces, one after the other, so that ONNX Runtime copies few weights at a time.

ONNX Runtime's CPU provider makes copies of the weights that it opens: fp16 weights widened to
float32, others packed for its kernels. Copies of all weights at once may not fit into memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from pass_runtime.backends.ort.engine import open_session

Array = npt.NDArray[Any]
MAX_PIECE_ELEMENTS = 32 << 20
"""The largest number of weight elements in a piece, unless a single node has more."""


def run_in_pieces(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Run the graph in the file `path` for each of `feeds`, inputs by name. Return for each feed
    the outputs by name, in the graph's order.

    Nodes that depend on constants alone, such as the dequantization of weights, run once for all
    feeds.
    """
    model = ir.load(path)
    arrays_of_feeds = [dict(feed) for feed in feeds]  # inputs, and what the pieces so far computed
    for nodes in _pieces(list(model.graph)):
        constant = _constant_nodes(nodes)
        (weights,) = _run(model, path, constant, [{}])
        varying = [node for node in nodes if node not in constant]
        results = _run(model, path, varying, [arrays | weights for arrays in arrays_of_feeds])
        # Other weights are no longer needed: nodes of this piece alone read them.
        read_later = {value.name for value in _results(model, nodes)}
        kept_weights = {name: array for name, array in weights.items() if name in read_later}
        for arrays, result in zip(arrays_of_feeds, results, strict=True):
            arrays |= result | kept_weights
    output_names = [str(value.name) for value in model.graph.outputs]
    return [{name: arrays[name] for name in output_names} for arrays in arrays_of_feeds]


def _run(
    model: ir.Model, path: Path, nodes: Collection[ir.Node], feeds: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """Run `nodes` for each of `feeds`, arrays by name. Return the arrays of their `_results`."""
    if not nodes:
        return [{} for _ in feeds]
    file = path.with_name(f"{path.stem}.piece.onnx")
    try:
        ir.save(_piece(model, nodes, feeds[0]), file)
        session = open_session(file, "cpu", exact=True)  # fused kernels would round to 8 bits
    finally:
        file.unlink(missing_ok=True)
    inputs = [value.name for value in session.get_inputs()]
    outputs = [value.name for value in session.get_outputs()]
    runs = (session.run(outputs, {name: feed[name] for name in inputs}) for feed in feeds)
    # Copied, because the arrays may be views that keep the session in memory.
    return [{name: array.copy() for name, array in zip(outputs, run, strict=True)} for run in runs]


def _pieces(nodes: Sequence[ir.Node]) -> Iterator[Sequence[ir.Node]]:
    """Split `nodes` into pieces: successive nodes that read at most MAX_PIECE_ELEMENTS elements of
    weights, or a single node that reads more."""
    start, sizes = 0, dict[ir.Value, int]()
    for index, node in enumerate(nodes):
        node_sizes = {
            value: value.const_value.size
            for value in node.inputs
            if value is not None and value.const_value
        }
        elements = sum((sizes | node_sizes).values())
        if node_sizes and index > start and elements > MAX_PIECE_ELEMENTS:
            yield nodes[start:index]
            start, sizes = index, {}
        sizes |= node_sizes
    yield nodes[start:]


def _constant_nodes(nodes: Sequence[ir.Node]) -> dict[ir.Node, None]:
    """Return those of `nodes` that depend on constants alone, in order."""
    constant: dict[ir.Node, None] = {}
    for node in nodes:
        inputs = [value for value in node.inputs if value is not None]
        if all(value.const_value is not None or value.producer() in constant for value in inputs):
            constant[node] = None
    return constant


def _results(model: ir.Model, nodes: Collection[ir.Node]) -> list[ir.Value]:
    """Return the outputs of `nodes` that other nodes read, or that are outputs of the model."""
    inside, model_outputs = set(nodes), set(model.graph.outputs)
    return [
        value
        for node in nodes
        for value in node.outputs
        if value in model_outputs or any(use.node not in inside for use in value.uses())
    ]


def _piece(model: ir.Model, nodes: Collection[ir.Node], feed: Mapping[str, Array]) -> ir.Model:
    """Return a model of `nodes` alone. Its inputs are what `nodes` read from other nodes, and its
    outputs are `_results`. feed: arrays by name, which tell the dtypes of the inputs."""
    inside = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    inputs = [
        value for value in read if value.const_value is None and value.producer() not in inside
    ]
    for value in inputs:
        value.dtype = ir.DataType.from_numpy(feed[str(value.name)].dtype)
    extracted = ir.convenience.extract(model.graph, inputs, _results(model, nodes))
    return ir.Model(extracted, ir_version=model.ir_version)
