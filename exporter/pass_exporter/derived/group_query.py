"""Replaces attention by ONNX Runtime's GroupQueryAttention in the CPU trunk for one sequence.
`derived.cuda` uses parts of this for the CUDA trunk.

This node reads the merged product of q, k and v, rotates q and k, writes the KV cache in place and
attends, for which the portable trunk has eleven nodes. Its time depends on the number of valid
cache entries, not on the capacity. It does not accept batches of windows with several rows, so a
trunk with it serves one slot.

On the CPU, its results are bit for bit the same for all window widths from two rows on, but a
single row is rounded differently. So a window of one row gets a spare row in attention, which has
the same position and is dropped from the result. The spare row's K/V are written into the entry
after the window, so the cache must have room for one more entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.convenience import extract

from pass_exporter.derived.heads import puts_heads_first
from pass_exporter.trunk.graph import initializer, take_place
from pass_runtime.backends.ort import onnxruntime as ort

DOMAIN = "com.microsoft"
HEAD_SIZE_MULTIPLE = 16
"""The operator rotates only heads whose size is a multiple of this."""
MIN_TABLE_ROWS = 2048
"""The smallest number of positions in the tables of cos and sin: an export's checks of a tiny model
use more positions than its capacity."""


@dataclass(frozen=True)
class Layer:
    """The attention of one layer in the portable trunk.

    attention: the node. rotary: the RotaryEmbedding of q; that of k has the same cos, sin and
    attributes.
    by_head: q, k and v [B,Q,heads,D], not yet rotated.
    past, present: the layer's cache of keys and of values, as inputs and as outputs of the trunk.
    heads, kv_heads: the number of heads of q, and of k and v.
    result: the rows [B,Q,H*D] that the output projection reads.
    window: the sliding window in positions, None if the layer has none.
    """

    attention: ir.Node
    rotary: ir.Node
    by_head: Sequence[ir.Value]
    past: Sequence[ir.Value]
    present: Sequence[ir.Value]
    heads: int
    kv_heads: int
    result: ir.Value
    window: int | None

    @property
    def attributes(self) -> dict[str, int | float]:
        """The attributes of the layer's GroupQueryAttention."""
        return {
            "num_heads": self.heads,
            "kv_num_heads": self.kv_heads,
            "do_rotary": 1,
            "scale": self.attention.attributes["scale"].as_float(),
        }

    @property
    def cos_sin(self) -> tuple[ir.Value | None, ...]:
        """The graph's values of cos and sin: layers with the same RoPE base share them."""
        return tuple(self.rotary.inputs[1:3])


@dataclass(frozen=True)
class _SharedInputs:
    """Inputs of GroupQueryAttention that layers share, and the spare row.

    sizes: `seqlens_k`, the number of valid entries after the pass minus one, and
    `total_sequence_length`, that number itself.
    tables: the tables of cos and sin (`rotation_tables`), by `Layer.cos_sin`.
    positions: [1,Q], of the window's rows.
    biases: what is added to the attention scores [1,1,Q,entries] to mask entries, by
    `Layer.window`.
    spare_row_pads: [6], the input `pads` with which a Pad adds the spare row to [B,Q,N] if the
    window has one row, and otherwise adds nothing.
    width: [1], the number of rows without the spare row.
    """

    sizes: Sequence[ir.Value]
    tables: Mapping[tuple[ir.Value | None, ...], Sequence[ir.Value]]
    positions: ir.Value
    biases: Mapping[int | None, ir.Value]
    spare_row_pads: ir.Value
    width: ir.Value


class UnsupportedAttention(Exception):
    """A layer's attention has nodes that this module cannot replace."""


def use_group_query_attention(
    model: ir.Model, max_capacity: int, windows: Sequence[int | None]
) -> bool:
    """Replace every Attention with its rotations and cache writes. Return False, and change
    nothing, if the operator cannot compute the model's attention.

    model: the portable trunk without spare rows. windows: as in `read_layers`.
    """
    try:
        layers = read_layers(model.graph, windows)
    except UnsupportedAttention:
        return False
    shared = _shared_inputs(model, layers, max_capacity)
    for layer in layers:
        _replace(model.graph, layer, shared)
    model.graph.opset_imports[DOMAIN] = 1
    return True


def read_layers(graph: ir.Graph, windows: Sequence[int | None]) -> list[Layer]:
    """Find the attention of every layer; raise UnsupportedAttention if the operator cannot compute
    it. windows: each layer's sliding window in positions, None if the layer has none."""
    attentions = [node for node in graph if node.op_type == "Attention"]
    return [_read_layer(node, window) for node, window in zip(attentions, windows, strict=True)]


def _read_layer(attention: ir.Node, window: int | None) -> Layer:
    queries, keys, values, _ = attention.inputs
    writes = [_producer(cache, "TensorScatter") for cache in (keys, values)]
    rotary, key_rotary = (
        _producer(value, "RotaryEmbedding") for value in (queries, writes[0].inputs[1])
    )
    unrotated = (rotary.inputs[0], key_rotary.inputs[0], writes[1].inputs[1])
    q, k, v = (_producer(value, "Transpose") for value in unrotated)
    same_rotation = (
        rotary.inputs[1:] == key_rotary.inputs[1:] and rotary.attributes == key_rotary.attributes
    )
    rotatable = (
        "rotary_embedding_dim" not in rotary.attributes
        and _size(q.outputs[0], 3) % HEAD_SIZE_MULTIPLE == 0
    )
    if not (same_rotation and rotatable and all(puts_heads_first(node) for node in (q, k, v))):
        raise UnsupportedAttention
    return Layer(
        attention,
        rotary,
        [_required(node.inputs[0]) for node in (q, k, v)],
        [_required(write.inputs[0]) for write in writes],
        [write.outputs[0] for write in writes],
        _size(q.outputs[0], 1),
        _size(k.outputs[0], 1),
        _result(attention),
        window,
    )


def qkv_rows(graph: ir.Graph, layer: Layer) -> Sequence[ir.Value]:
    """Return q, k and v as the operator reads them: one product [B,Q,(H+2*KVH)*D] if a Split of it
    makes all three, and else three values [B,Q,heads*D]."""
    flat = []
    for value in layer.by_head:
        producer = value.producer()
        if producer is not None and producer.op_type == "Reshape":
            flat.append(_required(producer.inputs[0]))
        else:  # The model normalizes the heads of q or k, so they have to be joined again.
            shape = initializer(graph, "group_query.flat", np.array([0, 0, -1]))
            reshape = ir.node("Reshape", [value, shape])
            graph.insert_before(layer.attention, reshape)
            flat.append(reshape.outputs[0])
    split = flat[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == flat:
        return [_required(split.inputs[0])]
    return flat


def _shared_inputs(model: ir.Model, layers: Sequence[Layer], max_capacity: int) -> _SharedInputs:
    """Add the nodes that compute the shared inputs, at the beginning of the graph."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    length, mask, row_position = inputs["length"], inputs["window_mask"], inputs["row_position"]
    nodes: list[ir.Node] = []

    def constant(name: str, value: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> ir.Value:
        return initializer(graph, f"group_query.{name}", np.array(value, dtype))

    def add(op: str, *values: ir.Value, **attributes: int | str) -> ir.Value:
        nodes.append(ir.node(op, values, attributes))
        return nodes[-1].outputs[0]

    zero, one = constant("zero", [0]), constant("one", [1])
    width = add("Shape", row_position)  # [1]
    # [1]: the number of spare rows, 1 if the window has one row, else 0. Q includes it below.
    spare = add("Cast", add("Less", width, constant("two", [2])), to=ir.DataType.INT64)
    total = add("Add", add("Add", length, width), spare)  # [1]: valid entries after the pass
    seqlens_k = add("Cast", add("Sub", total, one), to=ir.DataType.INT32)
    total_length = add("Cast", add("Squeeze", total), to=ir.DataType.INT32)
    # [Q]: positions relative to `length`. The mode "edge" gives the spare row that of the last row.
    offsets = add("Pad", row_position, add("Concat", zero, spare, axis=0), mode="edge")
    positions = add("Unsqueeze", add("Add", length, offsets), zero)  # [1,Q]
    unseen = constant("unseen", np.finfo(np.float32).min, np.float32)
    seen = constant("seen", 0, np.float32)
    bias = add("Where", mask, seen, unseen)
    # The spare row sees what the last row sees, and no row sees the spare row's entry: [Q,Q].
    bias = add("Pad", bias, add("Concat", zero, zero, spare, zero, axis=0), mode="edge")
    bias = add("Pad", bias, add("Concat", zero, zero, zero, spare, axis=0), unseen)
    # All rows see the entries before the window, at positions -length..-1 relative to `length`.
    bias = add("Pad", bias, add("Concat", zero, length, zero, zero, axis=0), seen)  # [Q,entries]
    before = add("Range", *(add("Squeeze", value) for value in (add("Neg", length), zero, one)))
    # [Q,entries]: the position of the row minus that of the entry
    distance = add("Sub", add("Unsqueeze", offsets, one), add("Concat", before, offsets, axis=0))
    biases = {}
    for size in dict.fromkeys(layer.window for layer in layers):
        windowed = (
            bias
            if size is None
            else add("Where", add("Less", distance, constant(f"{size}", size)), bias, unseen)
        )
        biases[size] = add("Unsqueeze", windowed, constant("outer_axes", [0, 1]))  # [1,1,Q,entries]
    spare_row_pads = add("Concat", zero, zero, zero, zero, spare, zero, axis=0)
    tables = rotation_tables(model, layers, max_capacity)
    graph.insert_before(graph[0], nodes)
    return _SharedInputs(
        [seqlens_k, total_length], tables, positions, biases, spare_row_pads, width
    )


def rotation_tables(
    model: ir.Model, layers: Sequence[Layer], max_capacity: int
) -> dict[tuple[ir.Value | None, ...], list[ir.Value]]:
    """Return constants with cos and sin [positions,D/2] of every position, by `Layer.cos_sin`. They
    are computed by running the trunk's own nodes.

    The operator needs a table row for every valid entry and for the spare row.
    """
    positions = np.arange(max(max_capacity + 1, MIN_TABLE_ROWS))
    feed = {"length": np.zeros(1, np.int64), "row_position": positions}
    constants = {}
    for index, cos_sin in enumerate(dict.fromkeys(layer.cos_sin for layer in layers)):
        names = [str(value.name) for value in cos_sin if value is not None]
        part = extract(model.graph, ["length", "row_position"], names)
        proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString()
        session = ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
        constants[cos_sin] = [
            initializer(model.graph, f"group_query.{name}{index}", np.ascontiguousarray(table[0]))
            for name, table in zip(("cos", "sin"), session.run(None, feed), strict=True)
        ]
    return constants


def _replace(graph: ir.Graph, layer: Layer, shared: _SharedInputs) -> None:
    padded = [ir.node("Pad", [rows, shared.spare_row_pads]) for rows in qkv_rows(graph, layer)]
    inputs: list[ir.Value | None] = [node.outputs[0] for node in padded]
    # The inputs for k and v are left out if the first is the merged product.
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
    zero, axis = (
        initializer(graph, f"group_query.{name}", np.array([n]))
        for name, n in (("zero", 0), ("one", 1))
    )
    window_rows = ir.node("Slice", [attended.outputs[0], zero, shared.width, axis])
    graph.insert_before(layer.attention, [*padded, attended, window_rows])
    for old, new in zip(layer.present, attended.outputs[1:], strict=True):
        replace_value(graph, old, new)
    replace_value(graph, layer.result, window_rows.outputs[0])


def replace_value(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Make all readers of `old` read `new`. If `old` is an output of the graph, `new` becomes that
    output, with its name."""
    for index, output in enumerate(graph.outputs):
        if output is old:
            graph.outputs[index] = new
            new.name, old.name = old.name, None
    take_place(old, new)


def _result(attention: ir.Node) -> ir.Value:
    """Return `Layer.result`: what a Transpose and a Reshape make of the attention's output."""
    value = attention.outputs[0]
    for op_type in ("Transpose", "Reshape"):
        users = [use.node for use in value.uses()]
        if len(users) != 1 or users[0].op_type != op_type:
            raise UnsupportedAttention
        value = users[0].outputs[0]
    return value


def _size(value: ir.Value, axis: int) -> int:
    """Return the size of [B,heads,Q,D] along an axis on which it is static."""
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise UnsupportedAttention
    return size


def _producer(value: ir.Value | None, op_type: str) -> ir.Node:
    """Return the node that computes `value`; raise UnsupportedAttention if it is no `op_type`."""
    node = _required(value).producer()
    if node is None or node.op_type != op_type:
        raise UnsupportedAttention
    return node


def _required(value: ir.Value | None) -> ir.Value:
    if value is None:
        raise UnsupportedAttention
    return value
