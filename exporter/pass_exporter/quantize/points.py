"""Finds the quantization points of a decoder: the tensors that its linear layers read.

A decoder layer of any family has four: the inputs of attention and of its output projection, and
the inputs of the MLP and of its down projection. All layers that read a point share its static
scale. Layers are named as in `model.adapter.linear_layers`.
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
    """Outputs of the layer `name` to which the channels of another layer's input are proportional.

    These are the outputs of v_proj for o_proj, and those of up_proj for down_proj: dividing an
    output divides a channel of the input.

    start, count: the outputs are start .. start+count-1.
    width, repeats: the input has each group of `width` outputs `repeats` times, because several
    query heads read the same V head.
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
    producer: the norm or the layer outputs that can be divided to divide the tensor's channels;
    None if there are none.
    """

    kind: PointKind
    readers: tuple[str, ...]
    producer: torch.nn.Module | LayerOutputs | None


def find_points(model: PreTrainedModel) -> list[QuantPoint]:
    """Return all points, in the order of the forward pass."""
    points: list[QuantPoint] = []
    for index, layer in enumerate(model.model.layers):
        points += _layer_points(model, f"layers.{index}", layer)
    return points


def _layer_points(model: PreTrainedModel, name: str, layer: Any) -> Iterator[QuantPoint]:
    # OLMo2 has no norms before attention and MLP, but after them.
    attention_norm = getattr(layer, "input_layernorm", None)
    mlp_norm = None if attention_norm is None else layer.post_attention_layernorm
    # Gemma3 has norms before and after the MLP, with other names.
    mlp_norm = getattr(layer, "pre_feedforward_layernorm", mlp_norm)
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    # Phi3 has one layer for q, k and v, and one for gate and up, with outputs in this order.
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    if hasattr(layer.self_attn, "qkv_proj"):
        qkv = ("qkv_proj",)
    is_fused = hasattr(layer.mlp, "gate_up_proj")
    gate_up = ("gate_up_proj",) if is_fused else ("gate_proj", "up_proj")
    v = _v_outputs(model, layer.self_attn, f"{attention}.{qkv[-1]}")
    width = layer.mlp.down_proj.in_features
    up = LayerOutputs(f"{mlp}.{gate_up[-1]}", width if is_fused else 0, width, width)
    yield QuantPoint("attention_in", tuple(f"{attention}.{part}" for part in qkv), attention_norm)
    yield QuantPoint("attention_out", (f"{attention}.o_proj",), v)
    yield QuantPoint("mlp_in", tuple(f"{mlp}.{part}" for part in gate_up), mlp_norm)
    yield QuantPoint("mlp_out", (f"{mlp}.down_proj",), up)


def _v_outputs(model: PreTrainedModel, attention: Any, name: str) -> LayerOutputs:
    """Return the outputs of the layer `name` that are V: the last ones, after any Q and K."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    head_dim = attention.o_proj.in_features // heads
    count = kv_heads * head_dim
    layer = attention.get_submodule(name.rpartition(".")[2])
    return LayerOutputs(name, layer.out_features - count, count, head_dim, heads // kv_heads)
