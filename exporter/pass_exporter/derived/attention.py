"""Finds the attention of a traced trunk, with its rotations and cache writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.convenience import extract

from pass_exporter.derived.heads import puts_heads_first
from pass_exporter.trunk.graph import initializer, only_user, operand, take_place
from pass_runtime.backends.ort import onnxruntime as ort
from pass_runtime.errors import PassError

MIN_TABLE_ROWS = 2048
"""An export's checks of a tiny model use more positions than its capacity."""


@dataclass(frozen=True)
class Layer:
    """The attention of one layer in the portable trunk.

    rotary: of q; that of k has the same cos, sin and attributes. by_head: q, k and v [B,Q,heads,D],
    not yet rotated. past, present: the cache of keys and of values. result: the rows [B,Q,H*D] that
    the output projection reads. window: the sliding window in positions, or None.
    """

    attention: ir.Node
    rotary: ir.Node
    by_head: Sequence[ir.Value]
    past: Sequence[ir.Value]
    present: Sequence[ir.Value]
    heads: int
    kv_heads: int
    head_size: int
    result: ir.Value
    window: int | None

    @property
    def scale(self) -> float:
        return self.attention.attributes["scale"].as_float()

    @property
    def cos_sin(self) -> tuple[ir.Value | None, ...]:
        """The values of cos and sin, which layers with the same RoPE base share."""
        return tuple(self.rotary.inputs[1:3])


class UnsupportedAttention(PassError):
    """A layer's attention has other nodes than expected."""

    def __init__(self) -> None:
        super().__init__("the model's attention is none that derived trunks compute; report it")


def read_layers(graph: ir.Graph, windows: Sequence[int | None]) -> list[Layer]:
    """Find the attention of every layer; raise UnsupportedAttention if it has other nodes than
    expected. windows: each layer's sliding window in positions, or None."""
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
    if not (same_rotation and all(puts_heads_first(node) for node in (q, k, v))):
        raise UnsupportedAttention
    return Layer(
        attention,
        rotary,
        [operand(node, 0) for node in (q, k, v)],
        [operand(write, 0) for write in writes],
        [write.outputs[0] for write in writes],
        _size(q.outputs[0], 1),
        _size(k.outputs[0], 1),
        _size(q.outputs[0], 3),
        _result(attention),
        window,
    )


def qkv_rows(graph: ir.Graph, layer: Layer) -> Sequence[ir.Value]:
    """Return q, k and v as one operator reads them: one product [B,Q,(H+2*KVH)*D] if a Split of it
    makes all three, and else three values [B,Q,heads*D]."""
    flat = []
    for value in layer.by_head:
        producer = value.producer()
        if producer is not None and producer.op_type == "Reshape":
            flat.append(operand(producer, 0))
        else:  # The model normalizes the heads of q or k, so they have to be joined again.
            shape = initializer(graph, "attention.flat", np.array([0, 0, -1]))
            reshape = ir.node("Reshape", [value, shape])
            graph.insert_before(layer.attention, reshape)
            flat.append(reshape.outputs[0])
    split = flat[0].producer()
    if split is not None and split.op_type == "Split" and list(split.outputs) == flat:
        return [operand(split, 0)]
    return flat


def rotation_tables(
    model: ir.Model, layers: Sequence[Layer], max_capacity: int
) -> dict[tuple[ir.Value | None, ...], list[ir.Value]]:
    """Return constants with cos and sin [positions,D/2], by `Layer.cos_sin`, which the trunk's own
    nodes compute."""
    positions = np.arange(max(max_capacity + 1, MIN_TABLE_ROWS))
    feed = {"length": np.zeros(1, np.int64), "row_position": positions}
    constants = {}
    for index, cos_sin in enumerate(dict.fromkeys(layer.cos_sin for layer in layers)):
        names = [str(value.name) for value in cos_sin if value is not None]
        part = extract(model.graph, ["length", "row_position"], names)
        proto = ir.to_proto(ir.Model(part, ir_version=model.ir_version)).SerializeToString()
        session = ort.InferenceSession(proto, providers=["CPUExecutionProvider"])
        constants[cos_sin] = [
            initializer(model.graph, f"rotation.{name}{index}", np.ascontiguousarray(table[0]))
            for name, table in zip(("cos", "sin"), session.run(None, feed), strict=True)
        ]
    return constants


def replace_attention(
    graph: ir.Graph,
    layer: Layer,
    operator: tuple[str, str],
    inputs: Sequence[ir.Value],
    attributes: Mapping[str, int | float],
) -> None:
    """Compute a layer's attention by an operator (its domain and type) that reads q, k and v, the
    cache, and then `inputs`."""
    rows = qkv_rows(graph, layer)
    # The inputs for k and v are left out if the first is the merged product.
    values = [*rows, *[None] * (3 - len(rows)), *layer.past, *inputs]
    domain, op_type = operator
    node = ir.node(op_type, values, attributes, domain=domain, num_outputs=3)
    graph.insert_before(layer.attention, node)
    for old, new in zip((layer.result, *layer.present), node.outputs, strict=True):
        take_place(old, new)


def _result(attention: ir.Node) -> ir.Value:
    transpose = only_user(attention.outputs[0], "Transpose")
    reshape = None if transpose is None else only_user(transpose.outputs[0], "Reshape")
    if reshape is None:
        raise UnsupportedAttention
    return reshape.outputs[0]


def _size(value: ir.Value, axis: int) -> int:
    size = None if value.shape is None else value.shape[axis]
    if not isinstance(size, int):
        raise UnsupportedAttention
    return size


def _producer(value: ir.Value | None, op_type: str) -> ir.Node:
    node = None if value is None else value.producer()
    if node is None or node.op_type != op_type:
        raise UnsupportedAttention
    return node
