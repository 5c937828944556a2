"""Derives trunks for ONNX Runtime on CUDA: for one sequence and for batches and, if there is an
adapter, also for passes without look-ahead rows. Launching a kernel takes 2 to 4 microseconds, so a
Llama's layer has 9 nodes, 18 in the trunk for batches, and 26 in the portable trunk.

GroupQueryAttention reads the KV cache in place. Its `total_sequence_length`, read on the host, is
the capacity, because a captured graph keeps it; `seqlens_k` is the number of valid entries minus
one. It has kernels for 16-bit dtypes only and refuses windows of several rows in a batch: the trunk
for batches keeps `Attention`, which copies K and V for every query head.
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

from pass_exporter.derived.attention import (
    MIN_TABLE_ROWS,
    Layer,
    UnsupportedAttention,
    read_layers,
    replace_attention,
    rotation_tables,
)
from pass_exporter.derived.heads import (
    norm_before_transpose,
    split_heads_by_constant,
    split_heads_together,
)
from pass_exporter.derived.rewrites import (
    DOMAIN,
    add_biases_before_split,
    drop_adapter,
    fuse_residual_norms,
    fuse_silu_products,
    gate_adapter_results,
    join_embedding_tables,
    remove_index_conversions,
    split_by_one_node,
)
from pass_exporter.model.families import Geometry
from pass_exporter.trunk.graph import initializer
from pass_runtime.bundle.manifest import DerivedTrunk

SINGLE_STEM, BATCHED_STEM = "trunk.cuda.one", "trunk.cuda"
HEAD_SIZE_MULTIPLE = 16
"""Of the heads that GroupQueryAttention rotates."""
PLAIN_MAX_BYTES = 2 << 30
"""Larger weights get no trunk without the adapter: both would put them on the device."""


@dataclass(frozen=True)
class _SharedInputs:
    """sizes: `seqlens_k` [1] and `total_sequence_length`. tables: cos and sin, by `Layer.cos_sin`.
    positions: [1,Q]. biases: added to the attention scores [1,1,Q,S], by `Layer.window`."""

    sizes: Sequence[ir.Value]
    tables: Mapping[tuple[ir.Value | None, ...], Sequence[ir.Value]]
    positions: ir.Value
    biases: Mapping[int | None, ir.Value]


def write_trunks_for_cuda(
    trunk: ir.Model, directory: Path, sizes: Geometry
) -> tuple[DerivedTrunk, ...]:
    """Write the graphs derived from `trunk`, which share its weights file, and return their
    manifest entries. Raises UnsupportedAttention, and writes nothing, for other attention than
    GroupQueryAttention's."""
    model = _copy(trunk)
    norm_before_transpose(model.graph)
    split_heads_by_constant(model.graph)
    _replace_attention(model, sizes.max_capacity, sizes.windows)
    derived = _write(model, directory / SINGLE_STEM, 1, sizes.vocab_size)
    model = _copy(trunk)
    split_heads_together(model.graph)
    return derived + _write(model, directory / BATCHED_STEM, None, sizes.vocab_size)


def _copy(trunk: ir.Model) -> ir.Model:
    model = trunk.clone()
    split_by_one_node(model.graph)
    add_biases_before_split(model.graph)
    return model


def _write(
    model: ir.Model, stem: Path, batch: Literal[1] | None, vocab_size: int
) -> tuple[DerivedTrunk, ...]:
    graph = model.graph
    join_embedding_tables(graph, vocab_size)
    remove_index_conversions(graph)
    # Before `fuse_residual_norms`, which would take the adapter's Adds for residual Adds.
    gate_adapter_results(graph, vocab_size)
    fuse_residual_norms(graph)
    fuse_silu_products(graph)
    derived = DerivedTrunk(file=f"{stem.name}.onnx", device="cuda", batch=batch)
    _save(model, stem.with_name(derived.file))
    tensors = (value.const_value for value in graph.initializers.values())
    weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    if weight_bytes > PLAIN_MAX_BYTES or not drop_adapter(graph):
        return (derived,)
    plain = derived.model_copy(update={"file": f"{stem.name}.plain.onnx", "lookahead_rows": False})
    _save(model, stem.with_name(plain.file))
    return derived, plain


def _save(model: ir.Model, path: Path) -> None:
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)


def _replace_attention(model: ir.Model, max_capacity: int, windows: Sequence[int | None]) -> None:
    layers = read_layers(model.graph, windows)
    for layer in layers:
        is_whole = "rotary_embedding_dim" not in layer.rotary.attributes
        if not is_whole or layer.head_size % HEAD_SIZE_MULTIPLE:
            raise UnsupportedAttention
    shared = _shared_inputs(model, layers, max_capacity)
    for layer in layers:
        _replace(model.graph, layer, shared)
    model.graph.opset_imports[DOMAIN] = 1


def _shared_inputs(model: ir.Model, layers: Sequence[Layer], max_capacity: int) -> _SharedInputs:
    """A node that reads a size (on the host) and a tensor of the device would copy the size: sizes
    are only bounds of a Slice of a constant, or shapes."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    length, row_position, mask = inputs["length"], inputs["row_position"], inputs["window_mask"]
    assert layers[0].past[0].dtype is not None
    float_dtype = layers[0].past[0].dtype.numpy()
    nodes: list[ir.Node] = []

    def constant(name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        return initializer(graph, f"group_query.{name}", np.array(value, dtype))

    def add(op: str, *values: ir.Value, **attributes: int | str | ir.TensorProtocol) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    zero, one = constant("zero", [0]), constant("one", [1])
    end = constant("end", [np.iinfo(np.int64).max])
    entries = max(max_capacity, MIN_TABLE_ROWS)
    width = add("Shape", row_position)  # [1]: Q
    capacity = add("Shape", layers[0].past[0], start=2, end=3)  # [1]: S
    # [1]: Q - 1, which is element Q of the constant. A Slice from Q on with the largest step takes
    # this element alone.
    last_row = add(
        "Slice", constant("last_row", np.arange(-1, entries), np.int32), width, end, zero, end
    )
    seqlens_k = add("Add", add("Cast", length, to=ir.DataType.INT32), last_row)
    total_length = add("Cast", capacity, to=ir.DataType.INT32)
    positions = add("Add", add("Unsqueeze", length, one), row_position)  # [1,Q]

    seen = constant("seen", np.zeros((1, 1, 1, 1)), float_dtype)
    unseen = constant("unseen", np.full((1, 1, 1, 1), np.finfo(float_dtype).min), float_dtype)
    window_bias = add("Where", mask, seen, unseen)  # [1,1,Q,Q]
    all_seen = add("Expand", seen, add("Concat", one, one, width, capacity, axis=0))
    # [1,1,Q,S]: rows see all of the text; what follows the window is not read.
    bias = add("TensorScatter", all_seen, window_bias, length, axis=3, mode="linear")
    biases: dict[int | None, ir.Value] = {None: bias}
    sliding = sorted({layer.window for layer in layers if layer.window is not None})
    if sliding:
        # [1,S]: the position of each entry, which in the text is its index
        indices = add("Slice", constant("columns", np.arange(entries)[None]), zero, capacity, one)
        columns = add("TensorScatter", indices, positions, length, axis=1, mode="linear")
        distance = add("Sub", add("Unsqueeze", positions, constant("two", [2])), columns)  # [1,Q,S]
        for size in sliding:
            near = add("Less", distance, constant(f"{size}", size))
            biases[size] = add("Where", near, bias, unseen)
    tables = rotation_tables(model, layers, max_capacity)
    graph.insert_before(graph[0], nodes)
    return _SharedInputs([seqlens_k, total_length], tables, positions, biases)


def _replace(graph: ir.Graph, layer: Layer, shared: _SharedInputs) -> None:
    tables, bias = shared.tables[layer.cos_sin], shared.biases[layer.window]
    inputs = [*shared.sizes, *tables, shared.positions, bias]
    attributes = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "do_rotary": 1,
        "scale": layer.scale,
    }
    replace_attention(graph, layer, (DOMAIN, "GroupQueryAttention"), inputs, attributes)
