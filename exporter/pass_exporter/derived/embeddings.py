"""Looks every id of a window up in one embedding table, for the trunks for CUDA.

The portable trunk has a table for the vocabulary, which the LM head may share, and one for the
look-ahead embeddings. It looks every id up in both and chooses one of the results, in eight nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place

LOOKAHEAD_TABLE = "lookahead_embeddings"
"""The initializer [L,H] of the look-ahead embeddings. Ids from V on select its rows."""


def join_embedding_tables(graph: ir.Graph, vocab_size: int) -> None:
    """Replace the two look-ups and the choice by one look-up in the joined table [V+L,H].

    ONNX Runtime joins the two tables once, when it opens the session, because both are constants,
    and then frees them. (An LM head that shares the vocabulary's table reads a transposed copy
    anyway.) Gemma multiplies the embeddings of tokens, and not those of look-ahead rows, by a
    factor: there a second look-up gives the factor of each row.
    """
    lookahead_table = graph.initializers[LOOKAHEAD_TABLE]
    (use,) = lookahead_table.uses()
    (choice,) = (each.node for each in use.node.outputs[0].uses())
    assert choice.op_type == "Where"
    look_up, factor = _producer(choice.inputs[2]), None
    if look_up.op_type == "Mul":
        factor = look_up.inputs[1]
        look_up = _producer(look_up.inputs[0])
    assert look_up.op_type == "Gather"
    joined = ir.node("Concat", [look_up.inputs[0], lookahead_table], {"axis": 0})
    nodes = [joined, ir.node("Gather", [joined.outputs[0], window_ids(graph)], {"axis": 0})]
    if factor is not None:
        assert factor.const_value is not None
        factors = by_id(
            graph, "embedding.factor", factor.const_value.numpy().reshape(()), 1, vocab_size
        )
        nodes += [factors, ir.node("Mul", [nodes[-1].outputs[0], factors.outputs[0]])]
    graph.insert_before(choice, nodes)
    take_place(choice.outputs[0], nodes[-1].outputs[0])


def by_id(
    graph: ir.Graph, name: str, of_token: npt.ArrayLike, of_lookahead: float, vocab_size: int
) -> ir.Node:
    """Return a node that computes a number for each row of the window, [B,Q,1]: `of_token` if the
    row's id is a token, `of_lookahead` if it selects a look-ahead embedding. The caller inserts the
    node into the graph.

    It looks the ids up in a new constant `name`, which takes fewer nodes than comparing them.
    """
    lookahead_table = graph.initializers[LOOKAHEAD_TABLE]
    shape, dtype = lookahead_table.shape, lookahead_table.dtype
    assert shape is not None and dtype is not None
    table = np.full((vocab_size + int(shape.numpy()[0]), 1), of_token, dtype.numpy())
    table[vocab_size:] = of_lookahead
    return ir.node("Gather", [initializer(graph, name, table), window_ids(graph)], {"axis": 0})


def window_ids(graph: ir.Graph) -> ir.Value:
    """Return the graph's input with the ids of the window's rows, [B,Q]."""
    return next(value for value in graph.inputs if value.name == "input_ids")


def _producer(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    assert node is not None
    return node


def remove_index_conversions(graph: ir.Graph) -> None:
    """Let each Gather of rows read its indices directly: bypass the Reshape to [-1] and the Cast to
    int64 of torch's exporter if the indices are an input of the graph, and [n] int64 already."""
    inputs = {*graph.inputs}
    for cast in [node for node in graph if node.op_type == "Cast"]:
        reshape = None if cast.inputs[0] is None else cast.inputs[0].producer()
        if reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] not in inputs:
            continue
        rows = reshape.inputs[0]
        assert rows is not None and rows.shape is not None
        if (
            len(rows.shape) == 1
            and rows.dtype == cast.attributes["to"].as_int() == ir.DataType.INT64
        ):
            cast.outputs[0].replace_all_uses_with(rows)
