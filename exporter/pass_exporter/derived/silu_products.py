"""Replaces the product up * SiLU(gate) of each layer by one node, in the trunks for CUDA.

The portable trunk has Sigmoid, Mul, Mul for the product. ONNX Runtime has no operator for it alone,
but it has GatedRMSNorm, which computes X * scale / sqrt(mean(X*X) + epsilon) * SiLU(gate) in
float32, with a mean over each group of columns. With an epsilon of 2**30 and a scale of 2**15, the
factor before SiLU is X times about 1 - mean(X*X) / 2**31. In float16 this is X, as long as the root
mean square of a group's values is below about a thousand. An export compares the trunk with torch,
which would find larger values.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.derived.heads import only_user
from pass_exporter.derived.residual_norms import DOMAIN
from pass_exporter.trunk.graph import initializer, take_place

EPSILON, SCALE = 2.0**30, 2.0**15
"""SCALE is the square root of EPSILON, and float16, its dtype in the graph, represents it."""
GROUP_COLUMNS = 128
"""The largest number of columns of a group. Every group of a row has GPU threads of its own."""


def fuse_silu_products(graph: ir.Graph) -> None:
    """Replace Sigmoid, Mul, Mul by GatedRMSNorm."""
    for sigmoid in [node for node in graph if node.op_type == "Sigmoid"]:
        gate = sigmoid.inputs[0]
        silu = only_user(sigmoid.outputs[0], "Mul")
        product = None if silu is None else only_user(silu.outputs[0], "Mul")
        if gate is None or silu is None or product is None or gate not in silu.inputs:
            continue
        up = next(value for value in product.inputs if value is not silu.outputs[0])
        columns = None if gate.shape is None else gate.shape[-1]
        if (
            up is None
            or up.shape is None
            or not isinstance(columns, int)
            or up.shape[-1] != columns
        ):
            continue
        assert gate.dtype is not None
        # The length of the scale is that of a group, which has to divide the columns.
        scale = np.full(np.gcd(columns, GROUP_COLUMNS), SCALE, gate.dtype.numpy())
        inputs = [up, initializer(graph, f"silu.scale.{scale.size}", scale), gate]
        attributes: dict[str, str | float] = {"activation": "silu", "epsilon": EPSILON}
        fused = ir.node("GatedRMSNorm", inputs, attributes, domain=DOMAIN)
        graph.insert_before(product, fused)
        take_place(product.outputs[0], fused.outputs[0])
        graph.remove([product, silu, sigmoid], safe=True)
        graph.opset_imports[DOMAIN] = 1
