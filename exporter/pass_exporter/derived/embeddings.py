"""Looks every id up in one table, and gathers rows without converting their indices.

The portable trunk has a table for the vocabulary, which the LM head may share, and one for the
look-ahead embeddings. It looks every id up in both and chooses, in eight nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer, take_place

LOOKAHEAD_TABLE = "lookahead_embeddings"
"""The initializer [L,H] of the look-ahead embeddings. Ids from V on select its rows."""


def join_embedding_tables(graph: ir.Graph, vocab_size: int) -> None:
    """Replace the two look-ups and the choice by one look-up in both tables joined, [V+L,H].

    ONNX Runtime joins them once, when it opens the session, because both are constants, and then
    frees the separate tables. (An LM head that shares the table reads a transposed copy anyway.)
    Gemma multiplies rows of the vocabulary by a number; a second look-up gives each row's factor.
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
    nodes = [ir.node("Concat", [look_up.inputs[0], lookahead_table], {"axis": 0})]
    nodes.append(ir.node("Gather", [nodes[-1].outputs[0], window_ids(graph)], {"axis": 0}))
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
    """Return a node, not yet in the graph, that computes [B,Q,1]: `of_token` for ids of tokens, and
    `of_lookahead` for those of look-ahead embeddings. A look-up in a table of both numbers, called
    `name`, takes fewer nodes than comparing ids."""
    lookahead_table = graph.initializers[LOOKAHEAD_TABLE]
    shape, dtype = lookahead_table.shape, lookahead_table.dtype
    assert shape is not None and dtype is not None
    table = np.full((vocab_size + int(shape.numpy()[0]), 1), of_token, dtype.numpy())
    table[vocab_size:] = of_lookahead
    return ir.node("Gather", [initializer(graph, name, table), window_ids(graph)], {"axis": 0})


def window_ids(graph: ir.Graph) -> ir.Value:
    """Return the input of the window's ids, [B,Q]."""
    return next(value for value in graph.inputs if value.name == "input_ids")


def _producer(value: ir.Value | None) -> ir.Node:
    node = None if value is None else value.producer()
    assert node is not None
    return node


def remove_index_conversions(graph: ir.Graph) -> None:
    """Let each Gather read its row indices directly: remove torch's Reshape to [-1] and Cast to
    int64 if the indices are an input that is [n] int64 already."""
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
