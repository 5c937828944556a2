"""Rewrites the trunk's MatMuls of quantized weights to read a DequantizeLinear of codes.

Some weights are scale * code + offset, with a scale and an offset for each block of inputs
(`QuantizedWeight`). DequantizeLinear adds no offsets. As all inputs of a block have the same
offset, the product of a row x with such a weight is the sum of two: x times (scale * code), and the
*block sums* of x times the offsets. A block sum is the sum of x over the inputs of a block. MatMuls
of the same rows share their block sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from pass_exporter.quantize.rounding import QuantizedWeight
from pass_exporter.quantize.weights import QuantizedModel
from pass_exporter.trunk.graph import WeightParts

DATA_TYPES = {
    ("int4", False): ir.DataType.INT4,
    ("int4", True): ir.DataType.UINT4,
    ("int8", False): ir.DataType.INT8,
    ("int8", True): ir.DataType.UINT8,
    ("fp8", False): ir.DataType.FLOAT8E4M3FN,
}
"""By `WeightScheme.code_type` and `zero_points`."""
MIN_SUM_COLUMNS = 16
"""A row has at least this many block sums. ONNX Runtime merges equal constants of up to 8 numbers,
and fuses no product whose constant has several readers, so the sums' matrices must be larger."""


def rewrite(model: ir.Model, weight_parts: WeightParts, quantized: QuantizedModel) -> None:
    """Make MatMuls of quantized weights read codes.

    weight_parts: by the name of a weight in the graph, the model's weights that it joins. The codes
    are transposed and packed only when the graph is saved, one tensor at a time.
    """
    rewriter = _Rewriter(model.graph)
    for node in list(model.graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        names = weight_parts.get(str(weight.name), ()) if weight is not None else ()
        parts = [quantized.weights[name] for name in names if name in quantized.weights]
        if weight is not None and parts and len(parts) == len(names):
            rewriter.replace(node, weight, parts)


class _Rewriter:
    """Rewrites MatMuls in a graph. MatMuls of the same rows share block sums."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._sums: dict[ir.Value, ir.Value] = {}

    def replace(self, node: ir.Node, weight: ir.Value, parts: Sequence[QuantizedWeight]) -> None:
        """Rewrite `node`, the product of rows and `weight`. parts: the codes of the weights that
        `weight` joins."""
        rows = node.inputs[0]
        assert rows is not None
        node.replace_input_with(1, self._dequantized(node, weight, parts))
        if parts[0].offsets is not None:
            if rows not in self._sums:
                self._sums[rows] = self._block_sums(node, f"{weight.name}.block_sums", parts[0])
            self._add_offsets(node, self._sums[rows], weight, parts)
        if not weight.uses():
            self._graph.initializers.pop(str(weight.name))

    def _dequantized(
        self, node: ir.Node, weight: ir.Value, parts: Sequence[QuantizedWeight]
    ) -> ir.Value:
        """Return the weight [in,out] of `node`, dequantized from the codes `parts`."""
        scheme = parts[0].scheme
        assert all(part.scheme == scheme for part in parts), (
            f"{weight.name} has more than one scheme"
        )
        inputs, outputs = parts[0].inputs, sum(len(part.data) for part in parts)
        kind = DATA_TYPES[scheme.code_type, scheme.zero_points]
        name = f"{weight.name}.{scheme.code_type}"
        dtype, size = weight.dtype, scheme.block_size
        assert dtype is not None
        blocks = (outputs,) if size is None else (inputs // size, outputs)

        def codes() -> ir.TensorProtocol:
            return _tensor(torch.cat([part.codes() for part in parts]), kind, (inputs, outputs))

        def scales() -> ir.TensorProtocol:
            return _tensor(torch.cat([part.scales for part in parts]), dtype, blocks)

        def zero_points() -> ir.TensorProtocol:
            tensors = [part.zero_points for part in parts if part.zero_points is not None]
            return _tensor(torch.cat(tensors), kind, blocks)

        operands = [self._lazy_initializer(name, kind, (inputs, outputs), codes)]
        operands.append(self._lazy_initializer(f"{name}.scale", dtype, blocks, scales))
        if scheme.zero_points:
            operands.append(self._lazy_initializer(f"{name}.zero_point", kind, blocks, zero_points))
        layout = {"axis": 1} if size is None else {"axis": 0, "block_size": size}
        dequantized = ir.node("DequantizeLinear", operands, layout)
        dequantized.outputs[0].shape = ir.Shape((inputs, outputs))
        dequantized.outputs[0].dtype = dtype
        self._graph.insert_before(node, dequantized)
        return dequantized.outputs[0]

    def _block_sums(self, node: ir.Node, name: str, packed: QuantizedWeight) -> ir.Value:
        """Return the block sums [...,sums] of the input rows [...,in] of `node`.

        Sums after the last block are 0: see MIN_SUM_COLUMNS. The sums are the product of the rows
        with a matrix of int4 codes, 1 at the inputs of a block and else 0. For a product with codes
        ONNX Runtime rounds the rows to 8 bits, as it does in `node`, and both must be products of
        the same rounded rows. The matrix has only this reader, because ONNX Runtime does not fuse a
        DequantizeLinear with several.
        """
        rows, blocks, sums = node.inputs[0], packed.scales.shape[1], _sum_columns(packed)
        assert rows is not None and rows.dtype is not None
        dtype, size = rows.dtype, packed.inputs // blocks
        matrix = torch.eye(sums, blocks, dtype=torch.int8).repeat_interleave(size, 1)  # [sums,in]
        kind, scales = ir.DataType.INT4, torch.ones(sums, blocks, dtype=packed.scales.dtype)
        shape, by_block = (packed.inputs, sums), (blocks, sums)
        operands = [
            self._lazy_initializer(name, kind, shape, lambda: _tensor(matrix, kind, shape)),
            self._lazy_initializer(
                f"{name}.scale", dtype, by_block, lambda: _tensor(scales, dtype, by_block)
            ),
        ]
        dequantized = ir.node("DequantizeLinear", operands, {"axis": 0, "block_size": size})
        dequantized.outputs[0].shape, dequantized.outputs[0].dtype = ir.Shape(shape), dtype
        product = ir.node("MatMul", [rows, dequantized.outputs[0]])
        product.outputs[0].dtype = dtype
        self._graph.insert_before(node, [dequantized, product])
        return product.outputs[0]

    def _add_offsets(
        self, node: ir.Node, sums: ir.Value, weight: ir.Value, parts: Sequence[QuantizedWeight]
    ) -> None:
        """Turn `node` into the sum of two products: rows by codes, block sums by offsets."""
        dtype, shape = weight.dtype, (_sum_columns(parts[0]), sum(len(part.data) for part in parts))
        assert dtype is not None

        def padded_offsets() -> ir.TensorProtocol:
            offsets = torch.cat([part.offsets for part in parts if part.offsets is not None])
            return _tensor(
                torch.nn.functional.pad(offsets, (0, shape[0] - offsets.shape[1])), dtype, shape
            )

        name = f"{weight.name}.offsets"
        by_codes = ir.node("MatMul", list(node.inputs))
        by_offsets = ir.node(
            "MatMul", [sums, self._lazy_initializer(name, dtype, shape, padded_offsets)]
        )
        for product in (by_codes, by_offsets):
            product.outputs[0].dtype = dtype
        self._graph.insert_before(node, [by_codes, by_offsets])
        node.op_type = "Add"
        node.replace_input_with(0, by_codes.outputs[0])
        node.replace_input_with(1, by_offsets.outputs[0])

    def _lazy_initializer(
        self,
        name: str,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        compute: Callable[[], ir.TensorProtocol],
    ) -> ir.Value:
        """Return the initializer `name`, added if there is none, with values computed on saving."""
        if name not in self._graph.initializers:
            value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
            value.const_value = ir.LazyTensor(
                compute, dtype=dtype, shape=ir.Shape(shape), name=name
            )
            self._graph.register_initializer(value)
        return self._graph.initializers[name]


def _sum_columns(packed: QuantizedWeight) -> int:
    """Return the number of block sums of a row, padding included."""
    return max(packed.scales.shape[1], MIN_SUM_COLUMNS)


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
