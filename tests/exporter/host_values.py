"""Finds values that ONNX Runtime's CUDA provider copies between host and device: sizes, and
arithmetic with sizes alone, are on the host. A graph with such a copy cannot be captured as a CUDA
graph."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

SIZES = ("Shape", "Size")
HOST_INPUTS: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "GroupQueryAttention": (6,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceSum": (1,),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""The inputs that CUDA kernels read on the host: their definitions have
InputMemoryType(OrtMemTypeCPUInput, ...)."""
DEVICE_OPERATORS = frozenset(
    """
    Abs Add And ArgMax ArgMin Attention Cast Ceil Clip Concat ConstantOfShape Cos CumSum
    DequantizeLinear Div Einsum Equal Erf Exp Expand Flatten Floor Gather GatherElements Gelu Gemm
    Greater GreaterOrEqual Identity IsInf IsNaN LayerNormalization Less LessOrEqual Log LogSoftmax
    MatMul MatMulInteger Max Min Mod Mul Neg Not Or Pad Pow QuantizeLinear RMSNormalization Range
    Reciprocal ReduceMax ReduceMean ReduceMin ReduceSum Relu Reshape RotaryEmbedding Round
    ScatterElements Shape Sigmoid Sign Sin Size Slice Softmax Split Sqrt Squeeze Sub Sum Tanh
    TensorScatter Tile TopK Transpose Trilu Unsqueeze Where Xor
    """.split()  # noqa: SIM905 (a list would be eighty lines)
)
"""Operators of opset 24 for which the CUDA provider of onnxruntime-gpu 1.31.1 has a kernel, by what
its library registers. A kernel for an earlier version of an operator does not run the later one:
such a node goes to the CPU, and its tensors are copied. The `gpu` extra begins at that release.
GatherND is left out: it has a kernel, but cannot be captured as a CUDA graph."""
ONNX_RUNTIMES_OPERATORS = frozenset(
    {"GatedAdd", "GatedRMSNorm", "GroupQueryAttention", "SkipSimplifiedLayerNormalization"}
)
"""Operators of com.microsoft in the trunks for CUDA. GroupQueryAttention's kernels are for 16-bit
numbers only."""
MAX_HOST_NUMBERS = 100
"""Arithmetic with sizes is computed on the host only if its constants have at most so many numbers
(`kSmallInitializerThreshold` in ONNX Runtime)."""


def copied_values(file: Path) -> list[str]:
    """Return a line for every node that reads sizes and tensors of the device, or has no CUDA
    kernel, and for every output that is a size."""
    graph = ir.load(file).graph
    sizes: set[ir.Value] = set()  # values on the host
    faults = []
    for node in graph:
        kernels = DEVICE_OPERATORS if not node.domain else ONNX_RUNTIMES_OPERATORS
        if node.op_type not in kernels:
            faults.append(f"{file.name}: {node.op_type} {node.name} has no kernel on the device")
        if node.op_type in SIZES:
            sizes.update(node.outputs)
            continue
        host_inputs = HOST_INPUTS.get(node.op_type, ())
        device_inputs = [
            value
            for index, value in enumerate(node.inputs)
            if index not in host_inputs and value is not None and not _is_small_constant(value)
        ]
        sizes_read = [value for value in device_inputs if value in sizes]
        if not sizes_read:
            continue  # the results of the node are on the device
        if len(sizes_read) == len(device_inputs):
            sizes.update(node.outputs)  # arithmetic with sizes alone
        else:
            names = ", ".join(str(value.name) for value in sizes_read)
            faults.append(f"{file.name}: {node.op_type} {node.name} reads the size {names}")
    return faults + [
        f"{file.name}: the output {value.name} is a size"
        for value in graph.outputs
        if value in sizes
    ]


def _is_small_constant(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= MAX_HOST_NUMBERS
