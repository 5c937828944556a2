"""Stores the 8-bit codes of a trunk in the types for which ONNX Runtime's CPU provider has fused
kernels.

The codes of activations change from int8 with zero point 0 to uint8 with zero point 128: a code q
in -128..127 is stored as q + 128, which means the same value. The portable trunk has int8 because
TensorRT needs it. The CPU provider does not fuse int8 activations, with which a pass of SmolLM2
takes 40 times as long.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def add_weight_zero_points(graph: ir.Graph) -> bool:
    """Give every int8 weight that has one scale for each output zero points, all 0. Return whether
    there are such weights.

    With zero points, ONNX Runtime can make the weights uint8 on CPUs that do not sum products of
    uint8 and int8 codes exactly. It fails if weights share zero points, so each has its own.
    """
    changed = False
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        codes, scales, *zero_points = node.inputs
        if (
            codes is None
            or codes.const_value is None
            or codes.dtype != ir.DataType.INT8
            or any(zero_points)
            or node.attributes.get_int("block_size")
        ):
            continue
        assert scales is not None and scales.shape is not None
        zeros = initializer(
            graph, f"{codes.name}.zero_point", np.zeros(scales.shape.numpy(), np.int8)
        )
        node.resize_inputs(3)
        node.replace_input_with(2, zeros)
        changed = True
    return changed


def unsigned_activations(graph: ir.Graph) -> None:
    """Change the codes of all activations to uint8, by a zero point of 128 in each QuantizeLinear
    and the DequantizeLinear that reads it."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        quantized = node.outputs[0]
        zero_point = initializer(graph, "activations.zero_point", np.array(128, np.uint8))
        for user in (node, *(use.node for use in quantized.uses())):
            user.resize_inputs(3)
            user.replace_input_with(2, zero_point)
        # A new object is assigned, because clones of a graph share their type objects.
        quantized.type = ir.TensorType(ir.DataType.UINT8)
