"""The supported model families, and the sizes of a model that the exporter needs."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from pass_runtime.errors import PassError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2")
"""Values of `config.model_type`; each has a parity test against torch."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the length of the sequence."""


MIN_CAPACITY = 16
"""The least number of positions: an export checks itself with a prompt and a few tokens."""


@dataclass(frozen=True)
class Geometry:
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_capacity: int
    """The longest sequence: the position limit, or the size of the sliding window if that is less. Up to this length a
    sliding window excludes nothing."""


def geometry(config: PretrainedConfig) -> Geometry:
    """Return the sizes of a supported model; PassError for any other model."""
    if config.model_type not in SUPPORTED:
        raise PassError(f"model type {config.model_type!r} is not supported; supported are {', '.join(SUPPORTED)}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in STATIC_ROPE:
        raise PassError(
            f"rotary type {rope['rope_type']!r} changes with the sequence; supported are {', '.join(STATIC_ROPE)}"
        )
    capacity = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        capacity = min(capacity, window)
    if capacity < MIN_CAPACITY:
        raise PassError(
            f"a model for sequences of {capacity} tokens (max_position_embeddings, sliding_window) is too short to "
            f"export: {MIN_CAPACITY} is the least"
        )
    if config.num_hidden_layers < 1:
        raise PassError(f"a model with {config.num_hidden_layers} layers (num_hidden_layers) cannot be exported")
    return Geometry(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_capacity=capacity // 4 * 4,  # TensorRT wants multiples of 4
    )
