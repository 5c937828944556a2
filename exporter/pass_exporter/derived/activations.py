"""Static 8-bit activations as ONNX Runtime's CPU kernels want them: uint8 around 128, not int8 around 0.

The same numbers: q in -128..127 is stored as q + 128. (TensorRT wants int8 around 0, which ONNX Runtime does not fuse:
a pass of SmolLM2 then takes 40 times as long.)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.trunk.graph import initializer


def unsigned_activations(graph: ir.Graph) -> None:
    """Every QuantizeLinear to int8, and the DequantizeLinear behind it."""
    for nodes in _graphs(graph):
        for node in [node for node in nodes if node.op_type == "QuantizeLinear"]:
            quantized = node.outputs[0]
            middle = initializer(graph, "activations.middle", np.array(128, np.uint8))
            for user in (node, *(use.node for use in quantized.uses())):
                user.resize_inputs(3)
                user.replace_input_with(2, middle)
            quantized.dtype = ir.DataType.UINT8


def _graphs(graph: ir.Graph) -> list[ir.Graph]:
    """`graph` and the branches in it."""
    inner = [attribute.as_graph() for node in graph for attribute in node.attributes.values() if _is_graph(attribute)]
    return [graph, *inner]


def _is_graph(attribute: ir.Attr) -> bool:
    return attribute.type == ir.AttributeType.GRAPH
