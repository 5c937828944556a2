"""Changes static 8-bit activations from int8 with zero point 0 to uint8 with zero point 128, for ONNX Runtime's CPU.

The values are the same: a code q in -128..127 is stored as q + 128. The portable trunk has int8 because TensorRT needs
it. ONNX Runtime's CPU provider does not fuse int8: a pass of SmolLM2 takes 40 times as long with it.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def unsigned_activations(graph: ir.Graph) -> None:
    """Changes the zero point of every QuantizeLinear, and of its DequantizeLinear, from int8 0 to uint8 128."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        quantized = node.outputs[0]
        zero_point = initializer(graph, "activations.zero_point", np.array(128, np.uint8))
        for user in (node, *(use.node for use in quantized.uses())):
            user.resize_inputs(3)
            user.replace_input_with(2, zero_point)
        quantized.dtype = ir.DataType.UINT8
