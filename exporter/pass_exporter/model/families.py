"""Which models the trunk's operator pattern covers, and the sizes that export needs of them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from pass_runtime.errors import PassError

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "olmo2")
"""Values of `config.model_type`. Each has a parity test against torch."""

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary types whose frequencies do not depend on the sequence."""


@dataclass(frozen=True)
class Geometry:
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_capacity: int
    """The longest sequence: the position limit, or the sliding window, within which a window changes nothing."""


def geometry(config: PretrainedConfig) -> Geometry:
    """Sizes of a supported model; raises PassError for anything else."""
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
    return Geometry(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_capacity=capacity // 4 * 4,  # TensorRT wants multiples of 4
    )
