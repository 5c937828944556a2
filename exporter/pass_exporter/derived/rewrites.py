"""Patterns of the portable trunk's nodes, and what derived trunks have in their place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from pass_exporter.trunk.graph import (
    constant,
    graph_input,
    initializer,
    only_user,
    operand,
    other_input,
    producer,
    take_place,
)
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS

DOMAIN = "com.microsoft"
"""Of ONNX Runtime's own operators."""
LOOKAHEAD_TABLE = "lookahead_embeddings"
"""The initializer [L,H] whose rows ids from V on select."""
EPSILON, SCALE = 2.0**30, 2.0**15
"""SCALE is the square root of EPSILON, and a float16."""
GROUP_COLUMNS = 128
"""Every group of a row has GPU threads of its own."""


def split_by_one_node(graph: ir.Graph) -> None:
    """Replace three Slices of a product, into adjacent parts, by one Split. (Phi3)"""
    slices_of: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "Slice" and node.inputs[0] is not None and _slices_last_axis(node):
            slices_of.setdefault(node.inputs[0], []).append(node)
    for product, slices in slices_of.items():
        shapes = [node.outputs[0].shape for node in slices]
        widths = [None if shape is None else shape[-1] for shape in shapes]
        sizes = [width for width in widths if isinstance(width, int)]
        starts = [_number(node.inputs[1]) for node in slices]
        if len(slices) != 3 or len(sizes) != 3 or starts != [0, sizes[0], sizes[0] + sizes[1]]:
            continue
        parts = initializer(graph, "projections." + "+".join(map(str, sizes)), np.array(sizes))
        split = ir.node("Split", [product, parts], {"axis": -1}, num_outputs=3)
        graph.insert_before(slices[0], split)
        for node, part in zip(slices, split.outputs, strict=True):
            take_place(node.outputs[0], part)
        graph.remove(slices, safe=True)


def _slices_last_axis(node: ir.Node) -> bool:
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    step = node.inputs[4] if len(node.inputs) > 4 else None
    return (
        rank is not None
        and _number(node.inputs[3]) in (-1, rank - 1)
        and (step is None or _number(step) == 1)
    )


def _number(value: ir.Value | None) -> int | None:
    array = constant(value)
    return int(array.item()) if array is not None and array.size == 1 else None


def add_biases_before_split(graph: ir.Graph) -> None:
    """Replace a Split, and Adds of biases, by an Add of all biases and a Split. (Qwen2)"""
    for split in [node for node in graph if node.op_type == "Split"]:
        adds = [only_user(part, "Add") for part in split.outputs]
        biases = [
            None if add is None else other_input(add, part)
            for add, part in zip(adds, split.outputs, strict=True)
        ]
        vectors = [array for bias in biases if (array := constant(bias)) is not None]
        if len(vectors) != len(adds) or any(vector.ndim != 1 for vector in vectors):
            continue
        name = "+".join(str(bias.name) for bias in biases if bias is not None)
        joined = initializer(graph, name, np.concatenate(vectors))
        total = ir.node("Add", [split.inputs[0], joined])
        parts = ir.node(
            "Split", [total.outputs[0], split.inputs[1]], split.attributes, num_outputs=len(adds)
        )
        graph.insert_before(split, [total, parts])
        old = [add for add in adds if add is not None]
        for add, part in zip(old, parts.outputs, strict=True):
            take_place(add.outputs[0], part)
        graph.remove([*old, split], safe=True)


def remove_index_conversions(graph: ir.Graph) -> None:
    """Bypass torch's Reshape to [-1] and Cast to int64 of inputs that are [n] int64 already."""
    inputs = {*graph.inputs}
    for cast in [node for node in graph if node.op_type == "Cast"]:
        reshape = None if cast.inputs[0] is None else cast.inputs[0].producer()
        if reshape is None or reshape.op_type != "Reshape" or reshape.inputs[0] not in inputs:
            continue
        rows = operand(reshape, 0)
        assert rows.shape is not None
        if (
            len(rows.shape) == 1
            and rows.dtype == cast.attributes["to"].as_int() == ir.DataType.INT64
        ):
            cast.outputs[0].replace_all_uses_with(rows)


def embedding_nodes(graph: ir.Graph) -> tuple[ir.Node, ir.Value, ir.Value | None]:
    """Return the Where between the vocabulary's and look-ahead embeddings, the vocabulary's table,
    and its factor (Gemma) or None."""
    (use,) = graph.initializers[LOOKAHEAD_TABLE].uses()
    (choice,) = (each.node for each in use.node.outputs[0].uses())
    assert choice.op_type == "Where"
    look_up, factor = producer(choice.inputs[2]), None
    if look_up.op_type == "Mul":
        factor, look_up = look_up.inputs[1], producer(look_up.inputs[0])
    assert look_up.op_type == "Gather"
    return choice, operand(look_up, 0), factor


def join_embedding_tables(graph: ir.Graph, vocab_size: int) -> None:
    """Replace both look-ups and the choice by one look-up in the joined table [V+L,H], which ONNX
    Runtime joins once. A second look-up gives Gemma's factor."""
    choice, table, factor = embedding_nodes(graph)
    joined = ir.node("Concat", [table, graph.initializers[LOOKAHEAD_TABLE]], {"axis": 0})
    ids = graph_input(graph, "input_ids")
    nodes = [joined, ir.node("Gather", [joined.outputs[0], ids], {"axis": 0})]
    number = constant(factor)
    if number is not None:
        factors = _by_id(graph, "embedding.factor", number.reshape(()), 1, vocab_size)
        nodes += [factors, ir.node("Mul", [nodes[-1].outputs[0], factors.outputs[0]])]
    graph.insert_before(choice, nodes)
    take_place(choice.outputs[0], nodes[-1].outputs[0])


def _by_id(
    graph: ir.Graph, name: str, of_token: npt.ArrayLike, of_lookahead: float, vocab_size: int
) -> ir.Node:
    """Look a number [B,Q,1] up by each row's id: fewer nodes than a comparison."""
    lookahead_table = graph.initializers[LOOKAHEAD_TABLE]
    shape, dtype = lookahead_table.shape, lookahead_table.dtype
    assert shape is not None and dtype is not None
    table = np.full((vocab_size + int(shape.numpy()[0]), 1), of_token, dtype.numpy())
    table[vocab_size:] = of_lookahead
    ids = graph_input(graph, "input_ids")
    return ir.node("Gather", [initializer(graph, name, table), ids], {"axis": 0})


def adapter_pads(graph: ir.Graph) -> list[ir.Node]:
    """Return the Pads of the adapter's products to whole windows: they depend on the number of
    rows."""
    rows = next((value for value in graph.inputs if value.name == LOOKAHEAD_ROWS), None)
    pads = [node for node in graph if node.op_type == "Pad"]
    return [] if rows is None else [pad for pad in pads if _depends_on_shape(pad.inputs[1], rows)]


def _depends_on_shape(value: ir.Value | None, source: ir.Value) -> bool:
    node = None if value is None else value.producer()
    if node is None:
        return False
    if node.op_type == "Shape":
        return source in node.inputs
    return any(_depends_on_shape(each, source) for each in node.inputs)


def gather_and_products(pad: ir.Node) -> tuple[ir.Node, list[ir.Node]]:
    """Return the Gather of the look-ahead rows, and all nodes between it and `pad`."""
    products: list[ir.Node] = []
    node = producer(pad.inputs[0])
    while node.op_type != "Gather":
        products.append(node)
        node = producer(node.inputs[0])
    return node, products


def gate_adapter_results(graph: ir.Graph, vocab_size: int) -> None:
    """Replace Gather, MatMul, MatMul, Pad, Add by MatMul, MatMul, GatedAdd, which adds each row's
    product times 1 for a look-ahead id, else 0: on a GPU nodes cost more than rows. Rounded
    products keep their nodes: the window's rows would be rounded twice."""
    pads = adapter_pads(graph)
    if not pads:
        return
    gate = _by_id(graph, "adapter.gate", 0, 1, vocab_size)
    graph.insert_before(graph[0], gate)
    for pad in pads:
        gather, products = gather_and_products(pad)
        if any(node.op_type == "DequantizeLinear" for node in products):
            continue
        gather.outputs[0].replace_all_uses_with(operand(gather, 0))
        for node in products:
            node.outputs[0].shape = None  # It had the number of look-ahead rows.
        (use,) = pad.outputs[0].uses()
        add, layer_result = use.node, use.node.inputs[1 - use.idx]
        gated = ir.node("GatedAdd", [layer_result, pad.inputs[0], gate.outputs[0]], domain=DOMAIN)
        graph.insert_before(add, gated)
        take_place(add.outputs[0], gated.outputs[0])
        graph.remove([add, pad, gather], safe=True)
    graph.opset_imports[DOMAIN] = 1


def drop_adapter(graph: ir.Graph) -> bool:
    """Bypass every GatedAdd. Return False if there is none."""
    nodes = [node for node in graph if node.op_type == "GatedAdd"]
    for node in nodes:
        node.outputs[0].replace_all_uses_with(operand(node, 0))
    return bool(nodes)


def residual_add(norm: ir.Node) -> ir.Node | None:
    """Return the Add of two activations [B,Q,N] before a norm, or None."""
    add = None if norm.inputs[0] is None else norm.inputs[0].producer()
    if add is None or add.op_type != "Add":
        return None
    shapes = [None if value is None else value.shape for value in add.inputs]
    return add if all(shape is not None and len(shape) == 3 for shape in shapes) else None


def fuse_residual_norms(graph: ir.Graph) -> None:
    """Replace Add, RMSNormalization by SkipSimplifiedLayerNormalization, which returns the sum
    too."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        add, scale = residual_add(norm), norm.inputs[1]
        if add is None or scale is None or not scale.is_initializer():
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, scale],
            {"epsilon": norm.attributes["epsilon"].as_float()},
            domain=DOMAIN,
            num_outputs=4,
        )
        normalized, *unused, summed = fused.outputs
        for value in unused:
            value.name = ""  # How ONNX marks an output that is not computed.
        graph.insert_before(add, fused)
        for old, new in ((norm.outputs[0], normalized), (add.outputs[0], summed)):
            take_place(old, new)
        graph.remove([norm, add], safe=True)
        graph.opset_imports[DOMAIN] = 1


def fuse_silu_products(graph: ir.Graph) -> None:
    """Replace Sigmoid, Mul, Mul by GatedRMSNorm: X * scale / sqrt(mean(X*X) + epsilon) *
    SiLU(gate).

    With EPSILON and SCALE, X times about 1 - mean(X*X) / 2**31: 1 in float16 if a group's root mean
    square is below a thousand. The export's checks would find larger values.
    """
    for sigmoid in [node for node in graph if node.op_type == "Sigmoid"]:
        gate = sigmoid.inputs[0]
        silu = only_user(sigmoid.outputs[0], "Mul")
        product = None if silu is None else only_user(silu.outputs[0], "Mul")
        if gate is None or silu is None or product is None or gate not in silu.inputs:
            continue
        up = other_input(product, silu.outputs[0])
        columns = None if gate.shape is None else gate.shape[-1]
        if (
            up is None
            or up.shape is None
            or not isinstance(columns, int)
            or up.shape[-1] != columns
        ):
            continue
        assert gate.dtype is not None
        # The length of the scale is that of a group, which has to divide the columns.
        scale = np.full(np.gcd(columns, GROUP_COLUMNS), SCALE, gate.dtype.numpy())
        inputs = [up, initializer(graph, f"silu.scale.{scale.size}", scale), gate]
        attributes: dict[str, str | float] = {"activation": "silu", "epsilon": EPSILON}
        fused = ir.node("GatedRMSNorm", inputs, attributes, domain=DOMAIN)
        graph.insert_before(product, fused)
        take_place(product.outputs[0], fused.outputs[0])
        graph.remove([product, silu, sigmoid], safe=True)
        graph.opset_imports[DOMAIN] = 1
