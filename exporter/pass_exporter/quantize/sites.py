"""The tensors that a decoder's linear layers read: what shares a scale, and what a factor can be moved into.

A decoder layer has four, in every family: what attention reads and what its output projection reads, and the same of
the MLP. Names of layers are those of `model.adapter.linear_layers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pass_exporter.quantize.spec import Kind


@dataclass(frozen=True)
class Rows:
    """Outputs start .. start+count-1 of the layer `name`, which another one reads (v by o, up by down).

    Every group of `width` rows is read `repeats` times in turn, as K/V heads are by the heads of their group.
    """

    name: str
    start: int
    count: int
    width: int
    repeats: int = 1


@dataclass(frozen=True)
class Site:
    """A tensor [...,in]. readers: the linear layers that read it, and it alone.

    source: the norm or the rows that make it, so that its channels can be divided there; None where they cannot.
    """

    kind: Kind
    readers: tuple[str, ...]
    source: torch.nn.Module | Rows | None


def find_sites(model: PreTrainedModel) -> list[Site]:
    """In the order of the forward pass."""
    return [
        site for index, layer in enumerate(model.model.layers) for site in _layer_sites(model, f"layers.{index}", layer)
    ]


def _layer_sites(model: PreTrainedModel, name: str, layer: Any) -> Iterator[Site]:
    before_attention = getattr(layer, "input_layernorm", None)  # OLMo2 has norms behind attention and MLP instead
    before_mlp = None if before_attention is None else layer.post_attention_layernorm
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    parts: tuple[str, ...] = ("qkv_proj",) if hasattr(layer.self_attn, "qkv_proj") else ("q_proj", "k_proj", "v_proj")
    yield Site("attention_in", tuple(f"{attention}.{part}" for part in parts), before_attention)
    yield Site("attention_out", (f"{attention}.o_proj",), _values(model, layer.self_attn, f"{attention}.{parts[-1]}"))
    fused = hasattr(layer.mlp, "gate_up_proj")  # Phi3, as qkv_proj
    parts = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    yield Site("mlp_in", tuple(f"{mlp}.{part}" for part in parts), before_mlp)
    width = layer.mlp.down_proj.in_features
    yield Site("mlp_out", (f"{mlp}.down_proj",), Rows(f"{mlp}.{parts[-1]}", width if fused else 0, width, width))


def _values(model: PreTrainedModel, attention: Any, name: str) -> Rows:
    """The rows of V, which are the last ones of a layer that makes Q and K as well."""
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    head_dim = attention.o_proj.in_features // heads
    count = kv_heads * head_dim
    layer = attention.get_submodule(name.rpartition(".")[2])
    return Rows(name, layer.out_features - count, count, head_dim, heads // kv_heads)
