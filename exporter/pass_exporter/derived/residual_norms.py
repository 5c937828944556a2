"""Fuses each residual Add and the norm of the sum into one node of ONNX Runtime's own operator
SkipSimplifiedLayerNormalization.

Every layer of the portable trunk has two such pairs. The fused node computes each row separately,
so its results are bit for bit the same for all window widths.
"""

from __future__ import annotations

import onnx_ir as ir

from pass_exporter.trunk.graph import take_place

DOMAIN = "com.microsoft"
"""Of ONNX Runtime's own operators."""


def fuse_residual_norms(graph: ir.Graph) -> None:
    """Replace Add, RMSNormalization by SkipSimplifiedLayerNormalization, whose outputs are the norm
    and the sum, which the next residual Add reads."""
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        total = norm.inputs[0]
        add = None if total is None else total.producer()
        if add is None or add.op_type != "Add" or not _fits(add, norm):
            continue
        fused = ir.node(
            "SkipSimplifiedLayerNormalization",
            [*add.inputs, norm.inputs[1]],
            {"epsilon": norm.attributes["epsilon"].as_float()},
            domain=DOMAIN,
            num_outputs=4,
        )
        normalized, *unused, summed = fused.outputs
        for value in unused:
            value.name = ""  # How ONNX marks an output that is not computed.
        graph.insert_before(add, fused)
        for old, new in ((norm.outputs[0], normalized), (add.outputs[0], summed)):
            take_place(old, new)
        graph.remove([norm, add], safe=True)
        graph.opset_imports[DOMAIN] = 1


def _fits(add: ir.Node, norm: ir.Node) -> bool:
    """Whether `add` adds two tensors [B,Q,N] and `norm` is over N, with a constant scale."""
    scale = norm.inputs[1]
    over_last_axis = norm.attributes.get_int("axis", -1) in (-1, 2)
    return (
        over_last_axis
        and scale is not None
        and scale.is_initializer()
        and all(_is_3d_activation(value) for value in add.inputs)
    )


def _is_3d_activation(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.shape is not None
        and len(value.shape) == 3
        and not value.is_initializer()
    )
