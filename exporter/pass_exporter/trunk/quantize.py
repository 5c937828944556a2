"""Weight-only quantization: a MatMul's weight becomes DequantizeLinear over int4, int8 or fp8 numbers.

int4, int8: symmetric, blocks of 32 along the inputs with one scale each; ONNX Runtime fuses them into one kernel. fp8
(E4M3): one scale for each output, for GPUs. TensorRT keeps all of them packed. Activations, embeddings, norms and the
KV cache keep the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from transformers import PreTrainedModel

from pass_exporter.config import Weights
from pass_exporter.model.adapter import Adapter
from pass_exporter.trunk.trace import ADAPTER_INPUT

BLOCK = 32
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}
STORAGE = {
    "int8": (ir.DataType.INT8, np.dtype(np.int8)),
    "int4": (ir.DataType.INT4, np.dtype(ml_dtypes.int4)),
    "fp8": (ir.DataType.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn)),
}
SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Scales tried for int4, in parts of the one that just covers the block; the least squared error wins."""

Floats = npt.NDArray[np.float32]


def block_of(kind: Weights, inputs: int) -> int:
    """How many inputs share a scale."""
    return inputs if kind == "fp8" else BLOCK


def quantize(weight: Floats, kind: Weights) -> tuple[npt.NDArray[Any], Floats]:
    """[in,out] -> numbers [in,out] and scales [in/block,out], with weight ~ number * scale of its block."""
    largest = LARGEST[kind]
    if kind == "fp8":
        cover = np.abs(weight).max(0, keepdims=True) / np.float32(largest)
        scale = np.where(cover > 0, cover, np.float32(1))
        return (weight / scale).astype(STORAGE["fp8"][1]), scale
    blocks = weight.reshape(-1, BLOCK, weight.shape[1])
    cover = np.abs(blocks).max(1, keepdims=True) / largest
    best_error, best_scale, best = np.full(cover.shape, np.inf, np.float32), cover, np.zeros(blocks.shape, np.int8)
    for shrink in SHRINK if kind == "int4" else SHRINK[:1]:
        scale = np.where(cover > 0, cover * np.float32(shrink), np.float32(1))
        integers = np.clip(np.rint(blocks / scale), -largest - 1, largest)
        error = ((integers * scale - blocks) ** 2).sum(1, keepdims=True)
        better = error < best_error
        best_error, best_scale = np.where(better, error, best_error), np.where(better, scale, best_scale)
        best = np.where(better, integers.astype(np.int8), best)
    return best.reshape(weight.shape), best_scale[:, 0].astype(np.float32)


def round_adapter(adapter: Adapter) -> None:
    """Make an adapter's factors what int8 keeps of them: it is small, so a quantized trunk never holds it in int4."""
    for factor in adapter.parameters():
        if factor.shape[1] % BLOCK == 0:
            integers, scales = quantize(factor.detach().float().numpy().T, "int8")
            factor.data = torch.from_numpy((integers * scales.repeat(BLOCK, 0)).T.copy()).to(factor.dtype)


def quantize_weights(model: ir.Model, kind: Weights) -> None:
    """Replace the weight of every MatMul whose inputs fill whole blocks of 32, the LM head included."""
    graph = model.graph
    for node in list(graph):
        if node.op_type != "MatMul" or node.inputs[1] is None:
            continue
        weight, transpose = node.inputs[1], node.inputs[1].producer()
        if transpose is not None and transpose.op_type == "Transpose" and transpose.inputs[0] is not None:
            source, turned = transpose.inputs[0], True  # tied to the embeddings, which stay as they are
        else:
            source, turned = weight, False
        tensor = source.const_value
        if not source.is_initializer() or tensor is None or len(tensor.shape) != 2:
            continue
        inputs, outputs = (int(size) for size in tensor.shape.numpy()[:: -1 if turned else 1])
        if inputs % BLOCK:
            continue
        own = "int8" if _is_adapter(node) else kind
        node.replace_input_with(1, _dequantized(graph, node, tensor, (inputs, outputs), turned, own))
        if turned and transpose is not None and not transpose.outputs[0].uses():
            graph.remove(transpose, safe=True)
        if not source.uses():
            graph.initializers.pop(str(source.name))


def pad_queries(model: ir.Model) -> None:
    """Give every Attention a second copy of its last query row, and drop its result.

    ONNX Runtime attends with other kernels for one row than for several, which differ by float32 rounding. Harmless by
    itself, but 8-bit rounding of activations blows it up: a plain pass would part from a wide one by half a logit.
    With this no Attention has one row, and all window widths agree bit for bit.
    """
    graph = model.graph
    parts = {"last": -1, "end": np.iinfo(np.int64).max, "start": 0, "axis": 2}
    sizes = {name: _constant(graph, f"pad_queries.{name}", value) for name, value in parts.items()}
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        query, mask = node.inputs[0], node.inputs[3]
        assert query is not None and mask is not None
        if mask not in masks:
            masks[mask] = _with_last_row(graph, node, mask, sizes)
        node.replace_input_with(0, _with_last_row(graph, node, query, sizes))
        node.replace_input_with(3, masks[mask])
        padded = node.outputs[0]
        first = ir.node("Slice", [padded, sizes["start"], sizes["last"], sizes["axis"]])
        first.outputs[0].shape, first.outputs[0].type = padded.shape, padded.type
        padded.shape = None
        padded.replace_all_uses_with(first.outputs[0])
        first.replace_input_with(0, padded)
        graph.insert_after(node, first)


def _with_last_row(graph: ir.Graph, before: ir.Node, value: ir.Value, sizes: dict[str, ir.Value]) -> ir.Value:
    """[B,H,Q,...] -> [B,H,Q+1,...]"""
    last = ir.node("Slice", [value, sizes["last"], sizes["end"], sizes["axis"]])
    both = ir.node("Concat", [value, last.outputs[0]], {"axis": 2})
    for node in (last, both):
        node.outputs[0].type = value.type
    graph.insert_before(before, [last, both])
    return both.outputs[0]


def _constant(graph: ir.Graph, name: str, value: int) -> ir.Value:
    constant = ir.Value(name=name, shape=ir.Shape([1]), type=ir.TensorType(ir.DataType.INT64))
    constant.const_value = ir.tensor(np.array([value], np.int64), name=name)
    graph.register_initializer(constant)
    return constant


def _is_adapter(node: ir.Node) -> bool:
    """Whether it multiplies what was gathered from look-ahead rows, as both factors of an adapter do."""
    producer = node.inputs[0].producer() if node.inputs[0] is not None else None
    if producer is not None and producer.op_type == "MatMul":
        return _is_adapter(producer)
    rows = producer.inputs[1] if producer is not None and producer.op_type == "Gather" else None
    while rows is not None and (reshape := rows.producer()) is not None:
        rows = reshape.inputs[0]
    return rows is not None and rows.name == ADAPTER_INPUT


def _dequantized(
    graph: ir.Graph, node: ir.Node, tensor: ir.TensorProtocol, shape: tuple[int, int], turned: bool, kind: Weights
) -> ir.Value:
    """Integers and scales as initializers, computed when they are written, and the DequantizeLinear over them."""
    data_type, storage = STORAGE[kind]

    def parts() -> tuple[npt.NDArray[Any], Floats]:
        values = tensor.numpy().astype(np.float32)
        return quantize(values.T if turned else values, kind)

    def integers() -> ir.TensorProtocol:
        return ir.tensor(parts()[0].astype(storage), dtype=data_type)

    def scales() -> ir.TensorProtocol:
        return ir.tensor(parts()[1].astype(tensor.dtype.numpy()).reshape(scale_shape))

    inputs, outputs = shape
    scale_shape = (outputs,) if kind == "fp8" else (inputs // BLOCK, outputs)
    name = f"{tensor.name}.{kind}"
    quantized = _initializer(graph, name, data_type, (inputs, outputs), integers)
    scale = _initializer(graph, f"{name}.scale", tensor.dtype, scale_shape, scales)
    layout = {"axis": 1} if kind == "fp8" else {"axis": 0, "block_size": BLOCK}
    restored = ir.node("DequantizeLinear", [quantized, scale], layout)
    restored.outputs[0].shape, restored.outputs[0].dtype = ir.Shape(shape), tensor.dtype
    graph.insert_before(node, restored)
    return restored.outputs[0]


def _initializer(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], compute: Callable[[], ir.TensorProtocol]
) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    value.const_value = ir.LazyTensor(compute, dtype=dtype, shape=ir.Shape(shape), name=name)
    graph.register_initializer(value)
    return value


@contextmanager
def quantized_layers(model: PreTrainedModel, kind: Weights) -> Iterator[None]:
    """torch's model as the quantized graph computes it: what the exporter's check compares the graph with."""

    def forward(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        assert isinstance(layer, torch.nn.Linear)
        if layer.in_features % BLOCK:
            return output
        numbers, scales = quantize(layer.weight.detach().float().numpy().T, kind)
        restored = numbers.astype(np.float32) * scales.repeat(block_of(kind, layer.in_features), 0)
        weight = torch.from_numpy(restored.T).to(layer.weight.dtype)
        return torch.nn.functional.linear(inputs[0], weight, layer.bias)

    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)] if kind != "full" else []
    hooks = [layer.register_forward_hook(forward) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
