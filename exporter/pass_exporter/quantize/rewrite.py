"""The trunk's MatMuls over quantized weights: DequantizeLinear over the numbers that the model was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from pass_exporter.quantize.grid import Packed
from pass_exporter.quantize.spec import Grid
from pass_exporter.quantize.weights import Quantized

DATA_TYPES = {
    ("int4", False): ir.DataType.INT4,
    ("int4", True): ir.DataType.UINT4,
    ("int8", False): ir.DataType.INT8,
    ("int8", True): ir.DataType.UINT8,
    ("fp8", False): ir.DataType.FLOAT8E4M3FN,
}

ZERO_POINT = "activation.zero_point"
"""The one zero point of all activations: 0, int8."""


def rewrite(model: ir.Model, quantized: Quantized) -> None:
    """Give every MatMul of `quantized` its numbers in place of its weight, and rounded rows where they have a scale.

    Numbers are laid out while they are written.
    """
    graph = model.graph
    rounded: dict[ir.Value, ir.Value] = {}
    summed: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not weight.is_initializer():
            continue
        names = weight_names(weight)
        parts = [quantized.weights.get(name) for name in names]
        found = [part for part in parts if part is not None]
        if not found or len(found) < len(parts):
            continue
        node.replace_input_with(1, _dequantized(graph, node, weight, found))
        scale, rows = quantized.activations.get(names[0]), node.inputs[0]
        if scale is not None and rows is not None:
            if rows not in rounded:
                rounded[rows] = _rounded(graph, node, rows, f"{names[0]}.input", scale, weight.dtype)
            node.replace_input_with(0, rounded[rows])
        if found[0].sums and rows is not None:
            if rows not in summed:
                summed[rows] = _with_sums(graph, node, rows, f"{weight.name}.block_sums", found[0])
            node.replace_input_with(0, summed[rows])
        if not weight.uses():
            graph.initializers.pop(str(weight.name))


def weight_names(weight: ir.Value) -> list[str]:
    """The weights [out,in] that lie, turned and side by side, in a MatMul's weight; see `graph.clean`."""
    return [name.removesuffix(".transposed") for name in str(weight.name).split("+")]


def _rounded(
    graph: ir.Graph, node: ir.Node, rows: ir.Value, name: str, scale: float, dtype: ir.DataType | None
) -> ir.Value:
    """QuantizeLinear and DequantizeLinear, int8 with the zero point 0: one pair for all that read the same rows."""
    assert dtype is not None
    step = _scalar(graph, f"{name}.scale", ir.tensor(np.array(scale, dtype.numpy())))
    zero = _scalar(graph, ZERO_POINT, ir.tensor(np.array(0, np.int8)))
    integers = ir.node("QuantizeLinear", [rows, step, zero])
    restored = ir.node("DequantizeLinear", [integers.outputs[0], step, zero])
    for output, kind in ((integers.outputs[0], ir.DataType.INT8), (restored.outputs[0], dtype)):
        output.shape, output.dtype = rows.shape, kind
    graph.insert_before(node, [integers, restored])
    return restored.outputs[0]


def _scalar(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def _dequantized(graph: ir.Graph, node: ir.Node, weight: ir.Value, parts: Sequence[Packed]) -> ir.Value:
    grid = parts[0].grid
    assert all(part.grid == grid for part in parts), f"{weight.name} has more than one grid"
    inputs, outputs = parts[0].inputs, sum(len(part.data) for part in parts)
    kind, name = DATA_TYPES[grid.numbers, grid.zero_points], f"{weight.name}.{grid.numbers}"
    dtype = weight.dtype
    assert dtype is not None
    blocks = (outputs,) if grid.block is None else (inputs // grid.block, outputs)

    def numbers() -> ir.TensorProtocol:
        return _tensor(torch.cat([part.numbers() for part in parts]), kind, (inputs, outputs))

    def scales() -> ir.TensorProtocol:
        return _tensor(torch.cat([part.scales for part in parts]), dtype, blocks)

    def zero_points() -> ir.TensorProtocol:
        return _tensor(torch.cat([part.zero_points for part in parts if part.zero_points is not None]), kind, blocks)

    operands = [_initializer(graph, name, kind, (inputs, outputs), numbers)]
    operands.append(_initializer(graph, f"{name}.scale", dtype, blocks, scales))
    if grid.zero_points:
        operands.append(_initializer(graph, f"{name}.zero_point", kind, blocks, zero_points))
    restored = ir.node("DequantizeLinear", operands, _layout(grid))
    restored.outputs[0].shape, restored.outputs[0].dtype = ir.Shape((inputs, outputs)), dtype
    graph.insert_before(node, restored)
    return restored.outputs[0]


def _with_sums(graph: ir.Graph, node: ir.Node, rows: ir.Value, name: str, packed: Packed) -> ir.Value:
    """Rows [...,in] and behind them the sums of their blocks. The sums are a product of integers, too: on ONNX Runtime
    it adds up what the other product multiplies, 8-bit numbers, and all window widths agree bit for bit. (Its ones are
    not shared: a DequantizeLinear with several readers is not fused.)
    """
    block, own = packed.grid.block, packed.inputs - packed.sums
    dtype = rows.dtype
    assert block is not None and dtype is not None
    blocks = (own // block, packed.sums)
    ones = torch.eye(packed.sums, own // block, dtype=torch.int8).repeat_interleave(block, 1)  # [sums,own]
    kind, scales = ir.DataType.INT4, torch.ones(blocks, dtype=packed.scales.dtype).T
    operands = [
        _initializer(graph, name, kind, (own, packed.sums), lambda: _tensor(ones, kind, (own, packed.sums))),
        _initializer(graph, f"{name}.scale", dtype, blocks, lambda: _tensor(scales, dtype, blocks)),
    ]
    restored = ir.node("DequantizeLinear", operands, {"axis": 0, "block_size": block})
    restored.outputs[0].shape, restored.outputs[0].dtype = ir.Shape((own, packed.sums)), dtype
    sums = ir.node("MatMul", [rows, restored.outputs[0]])
    both = ir.node("Concat", [rows, sums.outputs[0]], {"axis": -1})
    for made in (sums, both):
        made.outputs[0].dtype = dtype
    graph.insert_before(node, [restored, sums, both])
    return both.outputs[0]


def _layout(grid: Grid) -> dict[str, int]:
    return {"axis": 1} if grid.block is None else {"axis": 0, "block_size": grid.block}


def _tensor(values: torch.Tensor, dtype: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
    """[out,n] values as a tensor of `shape`, which is [n,out] or [out]."""
    turned = values.T.contiguous()
    if dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        nibbles = turned.view(torch.uint8).flatten() & 15
        nibbles = torch.nn.functional.pad(nibbles, (0, len(nibbles) % 2))
        return ir.PackedTensor((nibbles[::2] | (nibbles[1::2] << 4)).numpy(), dtype, shape=shape)
    if values.dtype == torch.float8_e4m3fn:
        array = turned.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    elif values.dtype == torch.bfloat16:
        array = turned.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = turned.numpy()
    return ir.tensor(np.ascontiguousarray(array).reshape(shape), dtype=dtype)


def _initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], compute: Callable[[], ir.TensorProtocol]
) -> ir.Value:
    if name in graph.initializers:  # of equal weights (a new adapter's zeros) the tracer keeps one
        return graph.initializers[name]
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.const_value = ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=name)
    graph.register_initializer(value)
    return value
