"""The quantization points of a decoder, the inputs of linear layers. Readers of one share a scale.

A decoder layer has four points in every family: the inputs of attention and of its output
projection, and the inputs of the MLP and of its down projection. Layers are named as in
`model.adapter.linear_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.quantize.spec import PointKind


@dataclass(frozen=True)
class LayerOutputs:
    """Outputs start .. start+count-1 of the layer `name`, channels of another layer's input.

    o_proj reads those of v_proj, and down_proj those of up_proj. Each group of `width` outputs
    appears `repeats` times in the input, because all query heads of a group read the same V head.
    """

    name: str
    start: int
    count: int
    width: int
    repeats: int = 1


@dataclass(frozen=True)
class QuantPoint:
    """A tensor [...,in] that linear layers read.

    readers: the names of all layers that read it.
    producer: the norm or the layer outputs that compute the tensor and can be scaled by channel;
    None if neither can.
    """

    kind: PointKind
    readers: tuple[str, ...]
    producer: torch.nn.Module | LayerOutputs | None


def find_points(model: PreTrainedModel) -> list[QuantPoint]:
    """Return all points, in the order of the forward pass."""
    layers = enumerate(model.model.layers)
    return [
        point for index, layer in layers for point in _layer_points(model, f"layers.{index}", layer)
    ]


def _layer_points(model: PreTrainedModel, name: str, layer: Any) -> Iterator[QuantPoint]:
    # OLMo2 has its norms after attention and MLP instead.
    before_attention = getattr(layer, "input_layernorm", None)
    before_mlp = None if before_attention is None else layer.post_attention_layernorm
    # Gemma3 has norms on both sides.
    before_mlp = getattr(layer, "pre_feedforward_layernorm", before_mlp)
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    parts: tuple[str, ...] = (
        ("qkv_proj",) if hasattr(layer.self_attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    )
    values = _v_outputs(model, layer.self_attn, f"{attention}.{parts[-1]}")
    yield QuantPoint(
        "attention_in", tuple(f"{attention}.{part}" for part in parts), before_attention
    )
    yield QuantPoint("attention_out", (f"{attention}.o_proj",), values)
    fused = hasattr(layer.mlp, "gate_up_proj")  # Phi3 fuses gate and up, as well as q, k and v.
    parts = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield QuantPoint("mlp_in", tuple(f"{mlp}.{part}" for part in parts), before_mlp)
    width = layer.mlp.down_proj.in_features
    up = LayerOutputs(f"{mlp}.{parts[-1]}", width if fused else 0, width, width)
    yield QuantPoint("mlp_out", (f"{mlp}.down_proj",), up)


def _v_outputs(model: PreTrainedModel, attention: Any, name: str) -> LayerOutputs:
    """Return the outputs of the layer `name` that are V: its last ones if it has Q and K too."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    head_dim = attention.o_proj.in_features // heads
    count = kv_heads * head_dim
    layer = attention.get_submodule(name.rpartition(".")[2])
    return LayerOutputs(name, layer.out_features - count, count, head_dim, heads // kv_heads)
