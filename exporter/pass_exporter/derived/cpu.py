"""trunk.cpu.onnx: the trunk as ONNX Runtime's CPU provider runs it fastest.

Inputs, outputs and the weights' file are trunk.onnx's own; what is computed is the same up to rounding, and bit for bit
the same for every window width, batch and capacity that is a multiple of 64.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.activations import unsigned_activations
from pass_exporter.derived.attention import fold_groups
from pass_exporter.derived.heads import cut_heads_at_once
from pass_runtime.bundle.manifest import DerivedTrunk

FILE = "trunk.cpu.onnx"


def trunk_for_cpu(trunk: Path) -> ir.Model:
    """The derived graph of `trunk`, whose weights stay in the file that they are in."""
    model = ir.load(trunk)
    cut_heads_at_once(model.graph)
    fold_groups(model.graph)
    unsigned_activations(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    return model


def write_trunk_for_cpu(trunk: Path) -> DerivedTrunk:
    """Write the derived graph beside `trunk`."""
    ir.save(trunk_for_cpu(trunk), trunk.with_name(FILE))
    return DerivedTrunk(file=FILE, device="cpu")
