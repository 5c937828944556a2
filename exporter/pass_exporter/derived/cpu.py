"""The trunk in the forms that ONNX Runtime's CPU provider runs fastest: for one sequence and for batches, and each of
these also for passes without look-ahead rows.

They have the inputs, the outputs and the weights' file of trunk.onnx. Their results are those of trunk.onnx up to
rounding. Those of one graph are bit for bit the same for every window width and, for batches, for every batch size and
capacity that is a multiple of 64.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.activations import unsigned_activations
from pass_exporter.derived.adapter_rows import add_in_place, gather_codes
from pass_exporter.derived.attention import fold_groups
from pass_exporter.derived.group_query import use_group_query_attention
from pass_exporter.derived.heads import cut_heads_at_once, norm_before_turning
from pass_exporter.derived.residual_norms import fuse_residual_norms
from pass_exporter.derived.without_adapter import drop_adapter
from pass_exporter.trunk.pad_queries import pad_queries
from pass_runtime.bundle.manifest import DerivedTrunk

BATCHES, ONE = "trunk.cpu", "trunk.cpu.one"


def write_trunks_for_cpu(
    trunk: Path, max_capacity: int, windows: Sequence[int | None], *, spare_rows: bool
) -> tuple[DerivedTrunk, ...]:
    """Write the derived graphs beside `trunk`, a graph without spare rows, whose weights stay in their file.

    spare_rows: a window of one row must agree with wider ones, so attention needs spare rows where it has no groups.
    windows: the positions that each layer sees, None for all.
    """
    model = ir.load(trunk)
    cut_heads_at_once(model.graph)
    if not fold_groups(model.graph) and spare_rows:
        pad_queries(model.graph)
    derived = _write(model, trunk.with_name(BATCHES), None)
    model = ir.load(trunk)
    norm_before_turning(model.graph)
    if use_group_query_attention(model, max_capacity, windows):
        derived += _write(model, trunk.with_name(ONE), 1)
    return derived


def _write(model: ir.Model, name: Path, batch: Literal[1] | None) -> tuple[DerivedTrunk, ...]:
    """Write a graph for all passes and, where there is an adapter, one for those without look-ahead rows.

    name: of the files, without what they end in.
    """
    unsigned_activations(model.graph)
    gather_codes(model.graph)
    add_in_place(model.graph)  # before norms are fused, which would take the adapter's sum for a residual
    fuse_residual_norms(model.graph)
    derived = _save(model, name.with_name(f"{name.name}.onnx"), batch, lookahead_rows=True)
    if not drop_adapter(model.graph):
        return (derived,)
    return derived, _save(model, name.with_name(f"{name.name}.plain.onnx"), batch, lookahead_rows=False)


def _save(model: ir.Model, path: Path, batch: Literal[1] | None, *, lookahead_rows: bool) -> DerivedTrunk:
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)
    return DerivedTrunk(file=path.name, device="cpu", batch=batch, lookahead_rows=lookahead_rows)
