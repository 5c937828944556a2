"""Derives the trunks for ONNX Runtime's CUDA provider, with as few nodes as its own operators
allow: one for a single sequence and one for batches and, if there is an adapter, each also in a
version for passes without look-ahead rows.

A pass of few rows takes a GPU little longer than launching its nodes does, 2 to 4 microseconds each
on an H200. So here a layer of a Llama has 9 nodes, or 18 for batches; in the portable trunk it has
26. For one sequence attention is a GroupQueryAttention, which reads the cache where it is.
`Attention` with a mask copies K and V out to all query heads.

GroupQueryAttention reads `total_sequence_length` on the host, so in a pass that is captured as a
CUDA graph it cannot be the length of the text. It is the capacity, which is a shape; `seqlens_k`,
on the device, gives the number of valid entries minus one, and entries after these are not read.
The operator has kernels for 16-bit dtypes only. It refuses batches of windows with several rows
("batch_size must be 1 when sequence_length > 1 and past context is given", a check that its CPU and
CUDA kernels share), so the trunk for batches has the portable trunk's attention and masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes import common as passes

from pass_exporter.derived.adapter_gate import gate_adapter_results
from pass_exporter.derived.embeddings import join_embedding_tables, remove_index_conversions
from pass_exporter.derived.group_query import (
    DOMAIN,
    MIN_TABLE_ROWS,
    Layer,
    qkv_rows,
    read_layer,
    replace_value,
    rotation_tables,
)
from pass_exporter.derived.heads import (
    norm_before_transpose,
    split_heads_by_constant,
    split_heads_together,
)
from pass_exporter.derived.projections import add_biases_before_split, split_by_one_node
from pass_exporter.derived.residual_norms import fuse_residual_norms
from pass_exporter.derived.silu_products import fuse_silu_products
from pass_exporter.derived.without_adapter import drop_adapter
from pass_exporter.trunk.graph import initializer
from pass_runtime.bundle.manifest import DerivedTrunk

SINGLE_STEM, BATCHED_STEM = "trunk.cuda.one", "trunk.cuda"

PLAIN_MAX_BYTES = 2 << 30
"""The largest weights, in bytes, for which there is also a trunk without the adapter: a session
that opens both holds the weights on the device twice. A pass over larger weights takes longer than
the launches that it would save."""


@dataclass(frozen=True)
class _SharedInputs:
    """Inputs of GroupQueryAttention that layers share.

    sizes: `seqlens_k` [1], the number of valid entries minus one, and `total_sequence_length`, the
    capacity.
    tables: cos and sin, by `Layer.cos_sin`. positions: [1,Q].
    biases: the masks [1,1,Q,S] as numbers that are added to scores, by `Layer.window`.
    """

    sizes: Sequence[ir.Value]
    tables: Mapping[tuple[ir.Value | None, ...], Sequence[ir.Value]]
    positions: ir.Value
    biases: Mapping[int | None, ir.Value]


def write_trunks_for_cuda(
    trunk: ir.Model,
    directory: Path,
    vocab_size: int,
    max_capacity: int,
    windows: Sequence[int | None],
) -> tuple[DerivedTrunk, ...]:
    """Write the graphs to `directory`: for one sequence and for batches and, if the model has an
    adapter and its weights are small, each also for passes without look-ahead rows. They share the
    weights file of `trunk`, the portable graph without spare rows.

    windows: each layer's sliding window in positions, None if the layer has none. Raises
    UnsupportedAttention, and writes nothing, if GroupQueryAttention cannot compute the model's
    attention.
    """
    model = _copy(trunk)
    norm_before_transpose(model.graph)
    split_heads_by_constant(model.graph)
    _replace_attention(model, max_capacity, windows)
    derived = _write(model, directory / SINGLE_STEM, 1, vocab_size)
    model = _copy(trunk)
    split_heads_together(model.graph)
    return derived + _write(model, directory / BATCHED_STEM, None, vocab_size)


def _copy(trunk: ir.Model) -> ir.Model:
    model = trunk.clone()
    split_by_one_node(model.graph)
    add_biases_before_split(model.graph)
    return model


def _write(
    model: ir.Model, stem: Path, batch: Literal[1] | None, vocab_size: int
) -> tuple[DerivedTrunk, ...]:
    """Rewrite what is not attention, and write the graph with the adapter and, if there is one,
    that without it. stem: the path of the files without their suffixes."""
    graph = model.graph
    join_embedding_tables(graph, vocab_size)
    remove_index_conversions(graph)
    # Before norms are fused: the adapter's Adds would be taken for residuals.
    gate_adapter_results(graph, vocab_size)
    fuse_residual_norms(graph)
    fuse_silu_products(graph)
    derived = DerivedTrunk(file=f"{stem.name}.onnx", device="cuda", batch=batch)
    _save(model, stem.with_name(derived.file))
    if _weight_bytes(graph) > PLAIN_MAX_BYTES or not drop_adapter(graph, "GatedAdd"):
        return (derived,)
    plain = derived.model_copy(update={"file": f"{stem.name}.plain.onnx", "lookahead_rows": False})
    _save(model, stem.with_name(plain.file))
    return derived, plain


def _weight_bytes(graph: ir.Graph) -> int:
    tensors = (value.const_value for value in graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _save(model: ir.Model, path: Path) -> None:
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)


def _replace_attention(model: ir.Model, max_capacity: int, windows: Sequence[int | None]) -> None:
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    layers = [read_layer(node, window) for node, window in zip(attentions, windows, strict=True)]
    shared = _shared_inputs(model, layers, max_capacity)
    for layer in layers:
        _replace(model.graph, layer, shared)
    model.graph.opset_imports[DOMAIN] = 1


def _shared_inputs(model: ir.Model, layers: Sequence[Layer], max_capacity: int) -> _SharedInputs:
    """Add the nodes that compute the shared inputs, at the beginning of the graph.

    Sizes are on the host, and a node that computes with sizes and tensors of the device would need
    a copy. So what depends on a size is sliced from a constant, or is a shape.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    length, row_position, mask = inputs["length"], inputs["row_position"], inputs["window_mask"]
    dtype = layers[0].past[0].dtype
    assert dtype is not None
    nodes: list[ir.Node] = []

    def constant(name: str, value: npt.ArrayLike, numbers: npt.DTypeLike = np.int64) -> ir.Value:
        return initializer(graph, f"group_query.{name}", np.array(value, numbers))

    def add(op: str, *values: ir.Value, **attributes: int | str | ir.TensorProtocol) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    zero = constant("zero", [0])
    one = constant("one", [1])
    end = constant("end", [np.iinfo(np.int64).max])
    entries = max(max_capacity, MIN_TABLE_ROWS)
    width = add("Shape", row_position)  # [1]: Q
    capacity = add("Shape", layers[0].past[0], start=2, end=3)  # [1]: S
    # Element Q of this table is Q - 1; with the largest step, Slice takes this element alone.
    last_row = add(
        "Slice", constant("last_row", np.arange(-1, entries), np.int32), width, end, zero, end
    )
    seqlens_k = add("Add", add("Cast", length, to=ir.DataType.INT32), last_row)
    total_length = add("Cast", capacity, to=ir.DataType.INT32)
    positions = add("Add", add("Unsqueeze", length, one), row_position)  # [1,Q]

    seen, unseen = (
        constant(name, np.full((1, 1, 1, 1), value), dtype.numpy())
        for name, value in (("seen", 0), ("unseen", np.finfo(dtype.numpy()).min))
    )
    window = add("Where", mask, seen, unseen)  # [1,1,Q,Q]
    shape = add("Concat", one, one, width, capacity, axis=0)
    all_seen = add("Expand", seen, shape)
    bias = add("TensorScatter", all_seen, window, length, axis=3, mode="linear")  # [1,1,Q,S]
    biases: dict[int | None, ir.Value] = {None: bias}
    sliding = sorted({layer.window for layer in layers if layer.window is not None})
    if sliding:
        # [1,S]
        columns = add("Slice", constant("columns", np.arange(entries)[None]), zero, capacity, one)
        # Their positions
        columns = add("TensorScatter", columns, positions, length, axis=1, mode="linear")
        distance = add("Sub", add("Unsqueeze", positions, constant("two", [2])), columns)  # [1,Q,S]
        for size in sliding:
            near = add("Less", distance, constant(f"{size}", size))
            biases[size] = add("Where", near, bias, unseen)
    pairs = dict.fromkeys(layer.cos_sin for layer in layers)
    tables = {pair: rotation_tables(model, pair, i, max_capacity) for i, pair in enumerate(pairs)}
    graph.insert_before(graph[0], nodes)
    return _SharedInputs([seqlens_k, total_length], tables, positions, biases)


def _replace(graph: ir.Graph, layer: Layer, shared: _SharedInputs) -> None:
    inputs: list[ir.Value | None] = [*qkv_rows(graph, layer)]
    inputs += [*[None] * (3 - len(inputs)), *layer.past]
    inputs += [
        *shared.sizes,
        *shared.tables[layer.cos_sin],
        shared.positions,
        shared.biases[layer.window],
    ]
    attended = ir.node(
        "GroupQueryAttention", inputs, layer.attributes, domain=DOMAIN, num_outputs=3
    )
    graph.insert_before(layer.attention, attended)
    for old, new in zip((layer.result, *layer.present), attended.outputs, strict=True):
        replace_value(graph, old, new)
