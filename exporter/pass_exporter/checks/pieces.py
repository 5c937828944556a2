"""Runs a graph in pieces, one after the other, so that only a piece's weights are copied at a time.

ONNX Runtime's CPU provider widens fp16 weights to float32 and packs others. A model that just fits into memory has no
room for such copies of all its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from pass_runtime.backends.ort.engine import open_session

Array = npt.NDArray[Any]
PIECE = 64 << 20
"""Bytes of weights in a piece, unless a single node has more."""


def run_in_pieces(path: Path, feeds: Sequence[Mapping[str, Array]]) -> list[list[Array]]:
    """The outputs of the graph in `path` for each of `feeds`, in the graph's order (`exact`: see `open_session`)."""
    model = ir.load(path)
    values = [dict(feed) for feed in feeds]
    for number, nodes in enumerate(_pieces(list(model.graph))):
        file = path.with_name(f"{path.stem}.piece{number}.onnx")
        try:
            ir.save(_piece(model, nodes, values[0]), file)
            session = open_session(file, "cpu", exact=True)
        finally:
            file.unlink(missing_ok=True)
        read, made = ([value.name for value in ends] for ends in (session.get_inputs(), session.get_outputs()))
        for known in values:
            found = session.run(made, {name: known[name] for name in read})
            known |= {name: array.copy() for name, array in zip(made, found, strict=True)}  # a copy lets the session go
        del session
    return [[known[str(value.name)] for value in model.graph.outputs] for known in values]


def _pieces(nodes: Sequence[ir.Node]) -> Iterator[Sequence[ir.Node]]:
    """Splits `nodes` into runs whose weights have at most PIECE bytes, or that are a single node."""
    started, sizes = 0, dict[ir.Value, int]()
    for at, node in enumerate(nodes):
        new = {value: value.const_value.nbytes for value in node.inputs if value is not None and value.const_value}
        if at > started and sum((sizes | new).values()) > PIECE:
            yield nodes[started:at]
            started, sizes = at, {}
        sizes |= new
    yield nodes[started:]


def _piece(model: ir.Model, nodes: Sequence[ir.Node], known: Mapping[str, Array]) -> ir.Model:
    """The graph of `nodes`. Its inputs come from earlier nodes; its outputs are read by later ones, or are the model's.

    known: the arrays so far, whose dtypes the inputs take.
    """
    inside, results = set(nodes), set(model.graph.outputs)
    read = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    inputs = [value for value in read if value.const_value is None and value.producer() not in inside]
    for value in inputs:
        value.dtype = ir.DataType.from_numpy(known[str(value.name)].dtype)
    made = (value for node in nodes for value in node.outputs)
    outputs = [value for value in made if value in results or any(use.node not in inside for use in value.uses())]
    return ir.Model(ir.convenience.extract(model.graph, inputs, outputs), ir_version=model.ir_version)
