"""trunk.cpu.onnx: the trunk in the form that ONNX Runtime's CPU provider runs fastest.

It has the inputs, the outputs and the weights' file of trunk.onnx. Its results are those of trunk.onnx up to rounding,
and bit for bit the same for every window width, batch size and capacity that is a multiple of 64.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.activations import unsigned_activations
from pass_exporter.derived.attention import fold_groups
from pass_exporter.derived.heads import cut_heads_at_once
from pass_exporter.trunk.pad_queries import pad_queries
from pass_runtime.bundle.manifest import DerivedTrunk

FILE = "trunk.cpu.onnx"


def write_trunk_for_cpu(trunk: Path, *, spare_rows: bool) -> DerivedTrunk:
    """Write the derived graph beside `trunk`, a graph without spare rows, whose weights stay in their file.

    spare_rows: a window of one row must agree with wider ones, so attention needs spare rows where it has no groups.
    """
    model = ir.load(trunk)
    cut_heads_at_once(model.graph)
    if not fold_groups(model.graph) and spare_rows:
        pad_queries(model.graph)
    unsigned_activations(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, trunk.with_name(FILE))
    return DerivedTrunk(file=FILE, device="cpu")
