"""Static 8-bit activations as ONNX Runtime's CPU kernels want them: uint8 around 128, not int8 around 0.

The values are the same: a code q in -128..127 is stored as q + 128. TensorRT wants int8 around 0, which ONNX Runtime
does not fuse; a pass of SmolLM2 then takes 40 times as long.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def unsigned_activations(graph: ir.Graph) -> None:
    """Give every QuantizeLinear to int8, and the DequantizeLinear that reads it, the zero point 128 in uint8."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        quantized = node.outputs[0]
        middle = initializer(graph, "activations.middle", np.array(128, np.uint8))
        for user in (node, *(use.node for use in quantized.uses())):
            user.resize_inputs(3)
            user.replace_input_with(2, middle)
        quantized.dtype = ir.DataType.UINT8
