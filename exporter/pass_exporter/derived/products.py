"""Replaces a trunk's products by the CPU's operators: Product, of codes, which takes in a bias, the
adapter of look-ahead rows, and activation(gate) * up; and DenseProduct, of weights that stay in
their file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from pass_exporter.derived.packing import GROUP, Bytes, interleave, is_symmetric, pack, packed_bytes
from pass_exporter.derived.rewrites import adapter_pads, gather_and_products
from pass_exporter.quantize.rounding import QuantizedWeight, round_to
from pass_exporter.quantize.spec import INT8
from pass_exporter.quantize.weights import ADAPTER_PREFIX, QuantizedModel
from pass_exporter.trunk.graph import (
    WeightParts,
    constant,
    graph_input,
    initializer,
    lazy_initializer,
    only_user,
    operand,
    other_input,
    producer,
    take_place,
)
from pass_runtime.bundle.tensors import LOOKAHEAD_ROWS

DOMAIN = "pass.cpu"
SILU, GELU_TANH = 1, 2
"""Values of the attribute `activation`."""

Array = npt.NDArray[Any]


@dataclass(eq=False)
class _Linear:
    """A product of rows [B,Q,in] with a quantized weight, and the nodes around it that it takes in.

    parts: the weights [out_i,in] that it joins. outputs: what other nodes read, one or one for each
    part, of `widths` columns. adapters: A [in,rank] and B [rank,out_i] of each part, or None.
    """

    name: str
    node: ir.Node
    rows: ir.Value
    parts: Sequence[QuantizedWeight]
    outputs: list[ir.Value]
    widths: list[int]
    bias: Array | None = None
    adapters: list[tuple[Array, Array] | None] = field(default_factory=list)
    removed: list[ir.Node] = field(default_factory=list)
    activation: int = 0


def use_products(graph: ir.Graph, weight_parts: WeightParts, quantized: QuantizedModel) -> None:
    """Replace every MatMul of a constant weight. weight_parts: as `trace_trunk` returns them."""
    pads = {pad.outputs[0] for pad in adapter_pads(graph)}
    linears: list[_Linear] = []
    for node in [node for node in graph if node.op_type == "MatMul"]:
        weight = node.inputs[1]
        if weight is None:
            continue
        names = weight_parts.get(str(weight.name), ())
        is_factor = bool(names) and names[0].startswith(ADAPTER_PREFIX)
        if names and not is_factor and all(name in quantized.weights for name in names):
            parts = [quantized.weights[name] for name in names]
            linears.append(_read_linear(node, str(weight.name), parts, pads))
    merged = _with_gates(graph, linears)
    for linear in merged:
        _write_product(graph, linear)
    for node in [node for node in graph if node.op_type == "MatMul"]:
        _use_dense_product(graph, node)
    graph.opset_imports[DOMAIN] = 1


def use_gates(graph: ir.Graph) -> None:
    """Replace activation(gate) * up by one node where no Product has taken it in."""
    for gate, up, activation, product, removed in _gates(graph):
        node = ir.node("Gate", [gate, up], {"activation": activation}, domain=DOMAIN)
        graph.insert_before(product, node)
        take_place(product.outputs[0], node.outputs[0])
        graph.remove([product, *removed], safe=True)


def _read_linear(
    node: ir.Node, name: str, parts: Sequence[QuantizedWeight], pads: set[ir.Value]
) -> _Linear:
    rows = operand(node, 0)
    linear = _Linear(name, node, rows, parts, [], [])
    result = node.outputs[0]
    add, bias = _bias(result)
    if add is not None:
        linear.bias, result = constant(bias), add.outputs[0]
        linear.removed.append(add)
    split = only_user(result, "Split")
    shape = None if split is None else split.outputs[0].shape
    axis = None if split is None else split.attributes.get_int("axis", 0)
    if split is None or shape is None or axis not in (-1, len(shape) - 1):
        linear.outputs, linear.widths = [result], [sum(len(part.data) for part in parts)]
    else:
        linear.outputs = list(split.outputs)
        linear.widths = [_columns(part) for part in split.outputs]
        linear.removed.append(split)
    for index, value in enumerate(linear.outputs):
        add = only_user(value, "Add")
        pad = None if add is None else other_input(add, value)
        if add is None or pad is None or pad not in pads:
            linear.adapters.append(None)
            continue
        linear.adapters.append(_read_adapter(producer(pad), rows))
        linear.outputs[index] = add.outputs[0]
        linear.removed.append(add)
    return linear


def _bias(result: ir.Value) -> tuple[ir.Node | None, ir.Value | None]:
    add = only_user(result, "Add")
    bias = None if add is None else other_input(add, result)
    vector = constant(bias)
    return (add, bias) if vector is not None and vector.ndim == 1 else (None, None)


def _read_adapter(pad: ir.Node, rows: ir.Value) -> tuple[Array, Array]:
    """Return A [in,rank] and B [rank,out] of the adapter whose results `pad` pads. Layers that read
    the same rows may have joined A's, and a split product."""
    gather, (by_b, *split, by_a) = gather_and_products(pad)
    assert gather.inputs[0] is rows
    a, b = constant(by_a.inputs[1]), constant(by_b.inputs[1])
    assert a is not None and b is not None
    if split:
        index = split[0].outputs.index(by_b.inputs[0])
        a = a[:, index * len(b) : (index + 1) * len(b)]
    return a, b


def _columns(value: ir.Value) -> int:
    size = None if value.shape is None else value.shape[-1]
    assert isinstance(size, int)
    return size


def _with_gates(graph: ir.Graph, linears: list[_Linear]) -> list[_Linear]:
    """Join the products of a gate and what it is multiplied with, if they have no bias."""
    by_output = {value: linear for linear in linears for value in linear.outputs}
    for gate, up, activation, product, removed in _gates(graph):
        first, second = by_output.get(gate), by_output.get(up)
        if first is None or second is None or first.bias is not None or second.bias is not None:
            continue
        if first is second:
            halves = first.outputs == [gate, up] and len(first.parts) == 1
            if not halves or first.widths[0] != first.widths[1]:
                continue
            (whole,) = first.parts
            parts = [_outputs(whole, slice(0, first.widths[0]))]
            parts.append(_outputs(whole, slice(first.widths[0], None)))
        else:
            if not len(first.outputs) == len(second.outputs) == 1 or first.rows is not second.rows:
                continue
            parts = [*first.parts, *second.parts]
            linears.remove(second)
            first.name += f"+{second.name}"
            first.widths += second.widths
            first.adapters += second.adapters
            first.removed += [second.node, *second.removed]
        first.parts, first.activation = parts, activation
        first.outputs = [product.outputs[0]]
        first.removed += [product, *removed]
    return linears


def _outputs(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    zero_points = None if weight.zero_points is None else weight.zero_points[rows]
    offsets = None if weight.offsets is None else weight.offsets[rows]
    return QuantizedWeight(
        weight.scheme, weight.data[rows], weight.scales[rows], zero_points, offsets
    )


def _gates(
    graph: ir.Graph,
) -> list[tuple[ir.Value, ir.Value, int, ir.Node, list[ir.Node]]]:
    """Find activation(gate) * up. Return gate, up, the activation, the last node, and those before
    it, the last first."""
    found = []
    for node in graph:
        gate = node.inputs[0] if node.inputs else None
        if node.op_type == "Sigmoid" and gate is not None:
            product = only_user(node.outputs[0], "Mul")
            if product is None or gate not in product.inputs:
                continue
            activated, removed, activation = product.outputs[0], [product, node], SILU
        elif node.op_type == "Gelu" and gate is not None:
            if node.attributes.get_string("approximate", "none") != "tanh":
                continue
            activated, removed, activation = node.outputs[0], [node], GELU_TANH
        else:
            continue
        last = only_user(activated, "Mul")
        up = None if last is None else other_input(last, activated)
        if last is not None and up is not None and up.shape == gate.shape:
            found.append((gate, up, activation, last, removed))
    return found


def _write_product(graph: ir.Graph, linear: _Linear) -> None:
    gated = bool(linear.activation)
    weights, attributes = packed_weight(graph, linear.name, linear.parts, gated=gated)
    inputs: list[ir.Value | None] = [linear.node.inputs[0], weights]
    columns = sum(linear.widths) // (2 if gated else 1)
    attributes |= {"K": linear.parts[0].inputs, "N": columns}
    if gated:
        attributes["activation"] = linear.activation
    bias = linear.bias
    inputs.append(None if bias is None else initializer(graph, f"{linear.name}.bias", bias))
    if any(linear.adapters):
        inputs += [graph_input(graph, LOOKAHEAD_ROWS), *_adapter(graph, linear, attributes)]
    while inputs[-1] is None:
        inputs.pop()
    node = ir.node("Product", inputs, attributes, domain=DOMAIN)
    added = [node]
    if len(linear.outputs) > 1:
        sizes = initializer(graph, f"{linear.name}.widths", np.array(linear.widths))
        split = ir.node(
            "Split", [node.outputs[0], sizes], {"axis": -1}, num_outputs=len(linear.widths)
        )
        added.append(split)
    results = added[-1].outputs
    graph.insert_before(linear.node, added)
    for old, new in zip(linear.outputs, results, strict=True):
        take_place(old, new)
    removed = {*linear.removed, linear.node}
    graph.remove([node for node in reversed(graph) if node in removed], safe=True)


def _adapter(graph: ir.Graph, linear: _Linear, attributes: dict[str, int]) -> list[ir.Value]:
    """Return the product's inputs a and b; add its attributes."""
    rank = next(len(pair[1]) for pair in linear.adapters if pair is not None)
    pairs = [
        pair or (np.zeros((linear.parts[0].inputs, rank)), np.zeros((rank, width)))
        for pair, width in zip(linear.adapters, linear.widths, strict=True)
    ]
    if not linear.activation and any(width % GROUP for width in linear.widths[:-1]):
        # The parts share groups of columns, so each gets the others' rows, with zeros.
        blocks = [
            np.pad(b, ((i * rank, (len(pairs) - 1 - i) * rank), (0, 0)))
            for i, (_, b) in enumerate(pairs)
        ]
        pairs = [(np.concatenate([a for a, _ in pairs], 1), np.concatenate(blocks, 1))]
        rank *= len(blocks)
    elif not linear.activation:
        starts = np.cumsum(linear.widths)[:-1] // GROUP
        attributes |= {f"part{i}": int(start) for i, start in enumerate(starts, 1)}
    attributes["rank"] = rank
    down = _pack_matrix(np.concatenate([a for a, _ in pairs], 1))
    ups = [_pack_matrix(b) for _, b in pairs]
    up = interleave(*ups) if linear.activation else np.concatenate(ups)
    return [
        initializer(graph, f"{linear.name}.adapter.{name}", array.reshape(-1))
        for name, array in (("a", down), ("b", up))
    ]


def _pack_matrix(matrix: Array) -> Bytes:
    padded = np.pad(matrix, ((0, -len(matrix) % 32), (0, 0)))
    weight = torch.from_numpy(padded.T.astype(np.float32))
    rounded = round_to(INT8, weight)
    codes = rounded.codes().numpy().view(np.uint8) + np.uint8(128)
    return pack(codes, 8, rounded.scales.half().numpy(), None)


def packed_weight(
    graph: ir.Graph, name: str, parts: Sequence[QuantizedWeight], *, gated: bool = False
) -> tuple[ir.Value, dict[str, int]]:
    """Return the initializer `name`.packed, packed when it is written, and the attributes that say
    how. If `gated`, the groups of the two parts alternate."""
    layouts = [part.layout() for part in parts]
    bits = max(bits for bits, *_ in layouts)
    symmetric = all(own == bits and is_symmetric(own, *rest) for own, _, *rest in layouts)
    widths, inputs = [len(part.data) for part in parts], parts[0].inputs
    if not gated:
        widths = [sum(widths)]
    size = sum(packed_bytes(width, inputs, bits, symmetric=symmetric) for width in widths)

    def compute() -> ir.TensorProtocol:
        unpacked = [part.unsigned() for part in parts]
        if not gated:
            codes, scales, offsets = (
                np.concatenate([each[i] for each in unpacked]) for i in (0, 2, 3)
            )
            unpacked = [(codes, bits, scales, offsets)]
        packed = [
            pack(codes, bits, scales, None if symmetric else offsets)
            for codes, _, scales, offsets in unpacked
        ]
        return ir.tensor((interleave(*packed) if gated else packed[0]).reshape(-1))

    value = lazy_initializer(graph, f"{name}.packed", ir.DataType.UINT8, [size], compute)
    return value, {"bits": bits, "symmetric": int(symmetric)}


def _use_dense_product(graph: ir.Graph, node: ir.Node) -> None:
    by_column, weight = 0, operand(node, 1)
    transpose = weight.producer()
    if transpose is not None and transpose.op_type == "Transpose":
        by_column, weight = 1, operand(transpose, 0)
    if not weight.is_initializer() or weight.dtype != ir.DataType.FLOAT:
        return
    inputs = [operand(node, 0), weight]
    add, bias = _bias(node.outputs[0])
    if bias is not None:
        inputs.append(bias)
    last = add or node
    product = ir.node("DenseProduct", inputs, {"by_column": by_column}, domain=DOMAIN)
    graph.insert_before(node, product)
    take_place(last.outputs[0], product.outputs[0])
    graph.remove([*([add] if add else []), node], safe=True)
