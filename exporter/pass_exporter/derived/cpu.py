"""Derives the trunks that are fastest on ONNX Runtime's CPU provider: one for a single sequence and
one for batches, and if there is an adapter, each also in a version for passes without look-ahead
rows.

They have the inputs, outputs and weights file of trunk.onnx, and the same results up to rounding.
The results of one graph are bit for bit the same for every window width. Those of a graph for
batches are also the same for every batch size, and for every capacity that is a multiple of 64; for
this, a model whose query heads share no key heads needs spare query rows (`trunk.pad_queries`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.activations import add_weight_zero_points, unsigned_activations
from pass_exporter.derived.adapter_rows import gather_codes, scatter_adapter_results
from pass_exporter.derived.attention import fold_groups
from pass_exporter.derived.group_query import use_group_query_attention
from pass_exporter.derived.heads import norm_before_transpose, split_heads_together
from pass_exporter.derived.residual_norms import fuse_residual_norms
from pass_exporter.derived.without_adapter import drop_adapter
from pass_exporter.trunk.pad_queries import pad_queries
from pass_runtime.bundle.manifest import DerivedTrunk

BATCHED_STEM, SINGLE_STEM = "trunk.cpu", "trunk.cpu.one"
"""The file names, without suffixes, of the trunks for batches and for one sequence."""


def write_trunks_for_cpu(
    trunk: ir.Model,
    directory: Path,
    max_capacity: int,
    windows: Sequence[int | None],
    *,
    spare_rows: bool,
) -> tuple[DerivedTrunk, ...]:
    """Write the derived graphs to `directory`, and return their manifest entries.

    trunk: the portable graph without spare rows, whose weights file the derived graphs share.
    windows: each layer's sliding window in positions, None if the layer has none.
    spare_rows: whether attention whose query heads share no key heads gets spare rows, so that
    windows of all widths agree bit for bit.
    """
    model = trunk.clone()
    split_heads_together(model.graph)
    if not fold_groups(model.graph) and spare_rows:
        pad_queries(model.graph)
    derived = _write(model, directory / BATCHED_STEM, None)
    model = trunk.clone()
    norm_before_transpose(model.graph)
    if use_group_query_attention(model, max_capacity, windows):
        derived += _write(model, directory / SINGLE_STEM, 1)
    return derived


def _write(model: ir.Model, stem: Path, batch: Literal[1] | None) -> tuple[DerivedTrunk, ...]:
    """Rewrite what is not attention, and write the graph for all passes and, if there is an
    adapter, the one for passes without look-ahead rows.

    stem: the path of the files without their suffixes. batch: 1 if the graph is for one sequence.
    """
    unsigned_activations(model.graph)
    zero_points = add_weight_zero_points(model.graph)
    gather_codes(model.graph)
    # Before `fuse_residual_norms`, which would take the adapter's Adds for residual Adds.
    scatter_adapter_results(model.graph)
    fuse_residual_norms(model.graph)
    derived = DerivedTrunk(
        file=f"{stem.name}.onnx",
        device="cpu",
        batch=batch,
        lookahead_rows=True,
        weight_zero_points=zero_points,
    )
    _save(model, stem.with_name(derived.file))
    if not drop_adapter(model.graph, "ScatterND"):
        return (derived,)
    plain = derived.model_copy(update={"file": f"{stem.name}.plain.onnx", "lookahead_rows": False})
    _save(model, stem.with_name(plain.file))
    return derived, plain


def _save(model: ir.Model, path: Path) -> None:
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)
