"""Rewrites the trunk's MatMuls of quantized weights to read a DequantizeLinear of codes.

DequantizeLinear adds no offsets. All inputs of a block share an offset, so the product of a row x
with (scale * code + offset) is x times (scale * code), plus the sums of x over each block times the
offsets. MatMuls of the same rows share their block sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from pass_exporter.quantize.rounding import QuantizedWeight
from pass_exporter.quantize.weights import QuantizedModel
from pass_exporter.trunk.graph import WeightParts, lazy_initializer

DATA_TYPES = {
    ("int4", False): ir.DataType.INT4,
    ("int4", True): ir.DataType.UINT4,
    ("int8", False): ir.DataType.INT8,
    ("int8", True): ir.DataType.UINT8,
    ("fp8", False): ir.DataType.FLOAT8E4M3FN,
}
"""By `WeightScheme.code_type` and `zero_points`."""
MIN_SUM_COLUMNS = 16
"""ONNX Runtime merges equal constants of up to 8 numbers, and fuses no product whose constant has
several readers, so the matrices of block sums are larger."""


def rewrite(model: ir.Model, weight_parts: WeightParts, quantized: QuantizedModel) -> None:
    """Make MatMuls of quantized weights read codes, which are transposed when the graph is saved.
    weight_parts: as `trace_trunk` returns them."""
    graph, sums = model.graph, dict[ir.Value, ir.Value]()
    for node in list(graph):
        rows, weight = node.inputs[:2] if node.op_type == "MatMul" else (None, None)
        names = weight_parts.get(str(weight.name), ()) if weight is not None else ()
        parts = [quantized.weights[name] for name in names if name in quantized.weights]
        if rows is None or weight is None or not parts or len(parts) != len(names):
            continue
        node.replace_input_with(1, _dequantized(graph, node, weight, parts))
        if parts[0].offsets is not None:
            if rows not in sums:
                sums[rows] = _block_sums(graph, node, f"{weight.name}.block_sums", parts[0])
            _add_offsets(graph, node, sums[rows], weight, parts)
        if not weight.uses():
            graph.initializers.pop(str(weight.name))


def _dequantized(
    graph: ir.Graph, node: ir.Node, weight: ir.Value, parts: Sequence[QuantizedWeight]
) -> ir.Value:
    scheme, dtype = parts[0].scheme, weight.dtype
    assert dtype is not None and all(part.scheme == scheme for part in parts)
    inputs, outputs = parts[0].inputs, sum(len(part.data) for part in parts)
    kind = DATA_TYPES[scheme.code_type, scheme.zero_points]
    name, size = f"{weight.name}.{scheme.code_type}", scheme.block_size
    blocks = (outputs,) if size is None else (inputs // size, outputs)

    def codes() -> ir.TensorProtocol:
        return _tensor(torch.cat([part.codes() for part in parts]), kind, (inputs, outputs))

    def scales() -> ir.TensorProtocol:
        return _tensor(torch.cat([part.scales for part in parts]), dtype, blocks)

    def zero_points() -> ir.TensorProtocol:
        tensors = [part.zero_points for part in parts if part.zero_points is not None]
        return _tensor(torch.cat(tensors), kind, blocks)

    operands = [lazy_initializer(graph, name, kind, (inputs, outputs), codes)]
    operands.append(lazy_initializer(graph, f"{name}.scale", dtype, blocks, scales))
    if scheme.zero_points:
        operands.append(lazy_initializer(graph, f"{name}.zero_point", kind, blocks, zero_points))
    return _dequantize(graph, node, operands, (inputs, outputs), size)


def _dequantize(
    graph: ir.Graph,
    before: ir.Node,
    operands: Sequence[ir.Value],
    shape: tuple[int, int],
    block_size: int | None,
) -> ir.Value:
    layout = {"axis": 1} if block_size is None else {"axis": 0, "block_size": block_size}
    node, dtype = ir.node("DequantizeLinear", operands, layout), operands[1].dtype
    assert dtype is not None
    node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(shape), dtype
    graph.insert_before(before, node)
    return node.outputs[0]


def _block_sums(graph: ir.Graph, node: ir.Node, name: str, part: QuantizedWeight) -> ir.Value:
    """Return the block sums [...,sums] of the rows of `node`; 0 after the last.

    They are a product with int4 codes of 1: ONNX Runtime rounds rows to 8 bits for such products,
    and both must be of the same rows. Their matrix has one reader, or ONNX Runtime would not fuse
    it.
    """
    rows, blocks, sums = node.inputs[0], part.scales.shape[1], _sum_columns(part)
    assert rows is not None and rows.dtype is not None
    dtype, size = rows.dtype, part.inputs // blocks
    matrix = torch.eye(sums, blocks, dtype=torch.int8).repeat_interleave(size, 1)  # [sums,in]
    kind, scales = ir.DataType.INT4, torch.ones(sums, blocks, dtype=part.scales.dtype)
    shape, by_block = (part.inputs, sums), (blocks, sums)
    operands = [
        lazy_initializer(graph, name, kind, shape, lambda: _tensor(matrix, kind, shape)),
        lazy_initializer(
            graph, f"{name}.scale", dtype, by_block, lambda: _tensor(scales, dtype, by_block)
        ),
    ]
    product = ir.node("MatMul", [rows, _dequantize(graph, node, operands, shape, size)])
    product.outputs[0].dtype = dtype
    graph.insert_before(node, product)
    return product.outputs[0]


def _add_offsets(
    graph: ir.Graph,
    node: ir.Node,
    sums: ir.Value,
    weight: ir.Value,
    parts: Sequence[QuantizedWeight],
) -> None:
    dtype, shape = weight.dtype, (_sum_columns(parts[0]), sum(len(part.data) for part in parts))
    assert dtype is not None

    def padded() -> ir.TensorProtocol:
        offsets = torch.cat([part.offsets for part in parts if part.offsets is not None])
        return _tensor(
            torch.nn.functional.pad(offsets, (0, shape[0] - offsets.shape[1])), dtype, shape
        )

    offsets = lazy_initializer(graph, f"{weight.name}.offsets", dtype, shape, padded)
    products = [ir.node("MatMul", list(node.inputs)), ir.node("MatMul", [sums, offsets])]
    graph.insert_before(node, products)
    node.op_type = "Add"
    for index, product in enumerate(products):
        product.outputs[0].dtype = dtype
        node.replace_input_with(index, product.outputs[0])


def _sum_columns(part: QuantizedWeight) -> int:
    return max(part.scales.shape[1], MIN_SUM_COLUMNS)


def _tensor(values: torch.Tensor, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
    """Return the transpose of values [out,n] as a tensor [n,out], or [out] if n is 1: `shape`."""
    transposed = values.T.contiguous()
    if dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        nibbles = transposed.view(torch.uint8).flatten() & 15
        nibbles = torch.nn.functional.pad(nibbles, (0, len(nibbles) % 2))
        return ir.PackedTensor((nibbles[::2] | (nibbles[1::2] << 4)).numpy(), dtype, shape=shape)
    if values.dtype == torch.float8_e4m3fn:
        array = transposed.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    elif values.dtype == torch.bfloat16:
        array = transposed.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = transposed.numpy()
    return ir.tensor(np.ascontiguousarray(array).reshape(shape), dtype=dtype)
