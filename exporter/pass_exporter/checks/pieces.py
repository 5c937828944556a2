"""Runs a graph in pieces, one after the other, so that ONNX Runtime copies few weights at a time.

Its CPU provider widens fp16 weights to float32 and packs others. Copies of all weights would not
fit into memory beside a large model.
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
"""The most weight elements in a piece, unless a single node has more."""


def run_in_pieces(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array]]:
    """Return the outputs of the graph in `path` by name, in their order, for each of `feeds`.

    Nodes that depend on constants alone, such as the dequantization of weights, run once for all
    feeds.
    """
    model = ir.load(path)
    values = [dict(feed) for feed in feeds]
    for nodes in _pieces(list(model.graph)):
        constant, results = _constant(nodes), {value.name for value in _results(model, nodes)}
        (weights,) = _run(model, path, constant, [{}])
        varying = [node for node in nodes if node not in constant]
        found = _run(model, path, varying, [known | weights for known in values])
        for known, made in zip(values, found, strict=True):
            known |= made | {name: weights[name] for name in weights if name in results}
    return [
        {str(value.name): known[str(value.name)] for value in model.graph.outputs}
        for known in values
    ]


def _run(
    model: ir.Model, path: Path, nodes: Collection[ir.Node], feeds: Sequence[Mapping[str, Array]]
) -> list[dict[str, Array]]:
    """Run `nodes` for each of `feeds`. Return their `_results` by name."""
    if not nodes:
        return [{} for _ in feeds]
    file = path.with_name(f"{path.stem}.piece.onnx")
    try:
        ir.save(_piece(model, nodes, feeds[0]), file)
        session = open_session(file, "cpu", exact=True)
    finally:
        file.unlink(missing_ok=True)
    read, made = (
        [value.name for value in ends] for ends in (session.get_inputs(), session.get_outputs())
    )
    runs = (session.run(made, {name: feed[name] for name in read}) for feed in feeds)
    # Views would keep the session in memory.
    return [{name: array.copy() for name, array in zip(made, run, strict=True)} for run in runs]


def _pieces(nodes: Sequence[ir.Node]) -> Iterator[Sequence[ir.Node]]:
    """Split `nodes` into sequences with at most MAX_PIECE_ELEMENTS weights, or of one node."""
    started, sizes = 0, dict[ir.Value, int]()
    for at, node in enumerate(nodes):
        new = {
            value: value.const_value.size
            for value in node.inputs
            if value is not None and value.const_value
        }
        if new and at > started and sum((sizes | new).values()) > MAX_PIECE_ELEMENTS:
            yield nodes[started:at]
            started, sizes = at, {}
        sizes |= new
    yield nodes[started:]


def _constant(nodes: Sequence[ir.Node]) -> dict[ir.Node, None]:
    """Return those of `nodes` that depend on constants alone, in order."""
    found: dict[ir.Node, None] = {}
    for node in nodes:
        read = [value for value in node.inputs if value is not None]
        if all(value.const_value is not None or value.producer() in found for value in read):
            found[node] = None
    return found


def _results(model: ir.Model, nodes: Collection[ir.Node]) -> list[ir.Value]:
    """Return the values of `nodes` that other nodes read or that are outputs of the model."""
    inside, outputs = set(nodes), set(model.graph.outputs)
    made = (value for node in nodes for value in node.outputs)
    return [
        value
        for value in made
        if value in outputs or any(use.node not in inside for use in value.uses())
    ]


def _piece(model: ir.Model, nodes: Collection[ir.Node], known: Mapping[str, Array]) -> ir.Model:
    """Return a model of `nodes` alone. Its inputs come from other nodes; its outputs are
    `_results`.

    known: the arrays computed so far; they give the inputs' dtypes.
    """
    inside = set(nodes)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    inputs = [
        value for value in read if value.const_value is None and value.producer() not in inside
    ]
    for value in inputs:
        value.dtype = ir.DataType.from_numpy(known[str(value.name)].dtype)
    extracted = ir.convenience.extract(model.graph, inputs, _results(model, nodes))
    return ir.Model(extracted, ir_version=model.ir_version)
