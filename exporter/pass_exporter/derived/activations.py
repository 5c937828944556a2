"""Lays 8-bit codes out as ONNX Runtime's CPU provider wants them.

Static activations change from int8 with zero point 0 to uint8 with zero point 128.

The values are the same: a code q in -128..127 is stored as q + 128. The portable trunk has int8
because TensorRT needs it. ONNX Runtime's CPU provider does not fuse int8: a pass of SmolLM2 takes
40 times as long with it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def add_weight_zero_points(graph: ir.Graph) -> bool:
    """Give every int8 weight with a scale for each output zero points, all 0, so that ONNX Runtime
    can make it uint8 on CPUs that do not sum products of uint8 and int8 codes exactly. Each weight
    has zero points of its own, because ONNX Runtime fails if they are shared. Return whether it
    did."""
    found = False
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        codes, scales, *zero_points = node.inputs
        blocks = node.attributes.get("block_size")
        if (
            codes is None
            or codes.const_value is None
            or codes.dtype != ir.DataType.INT8
            or any(zero_points)
        ):
            continue
        if blocks is None or not blocks.as_int():
            assert scales is not None and scales.shape is not None
            zeros = initializer(
                graph, f"{codes.name}.zero_point", np.zeros(scales.shape.numpy(), np.int8)
            )
            node.resize_inputs(3)
            node.replace_input_with(2, zeros)
            found = True
    return found


def unsigned_activations(graph: ir.Graph) -> None:
    """Change the zero point of every QuantizeLinear and its DequantizeLinear to uint8 128."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        quantized = node.outputs[0]
        zero_point = initializer(graph, "activations.zero_point", np.array(128, np.uint8))
        for user in (node, *(use.node for use in quantized.uses())):
            user.resize_inputs(3)
            user.replace_input_with(2, zero_point)
        # A new one, because clones of a graph share types.
        quantized.type = ir.TensorType(ir.DataType.UINT8)
