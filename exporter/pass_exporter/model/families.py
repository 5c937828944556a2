"""Which models are supported, by their configuration; their sizes, and the masks of sliding
windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from pass_runtime.errors import PassError

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text", "olmo2")

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Frequencies of these types do not depend on a text's length."""

UNSUPPORTED_SETTINGS = {
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "use_bidirectional_attention": "attention in both directions",
}

MIN_CAPACITY = 16
"""An export's checks decode after a prompt."""


WINDOW_IN_ALL_LAYERS = ("mistral", "phi3")
"""Families whose layers all have the window `sliding_window`."""
WINDOW_BY_LAYER = ("qwen2", "qwen3", "gemma3_text")
"""Families whose `layer_types` say which layers have it. Their decoders take a mask for each type.
"""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

Masks = torch.Tensor | dict[str, torch.Tensor]


@dataclass(frozen=True)
class Geometry:
    """max_capacity: the largest KV capacity in tokens. windows: each layer's sliding window in
    positions, None if it has none."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_capacity: int
    windows: tuple[int | None, ...]


def geometry(config: PretrainedConfig) -> Geometry:
    """Return the sizes of a model. Raises PassError if the exporter does not support the model."""
    if config.model_type not in SUPPORTED_FAMILIES:
        raise PassError(
            f"model type {config.model_type!r} is not supported; the exporter supports "
            f"{', '.join(SUPPORTED_FAMILIES)}"
        )
    for name in rotary_types(config):
        if name not in STATIC_ROPE_TYPES:
            raise PassError(
                f"rotary type {name!r} is not supported; the exporter supports "
                f"{', '.join(STATIC_ROPE_TYPES)}"
            )
    for setting, feature in UNSUPPORTED_SETTINGS.items():
        if getattr(config, setting, None):
            raise PassError(f"{feature} ({setting} in config.json) is not supported")
    positions = config.max_position_embeddings
    if positions < MIN_CAPACITY:
        raise PassError(
            f"a model for at most {positions} tokens (max_position_embeddings) cannot be exported: "
            f"the checks of an export need {MIN_CAPACITY}"
        )
    if config.num_hidden_layers < 1:
        raise PassError(
            f"a model with {config.num_hidden_layers} layers (num_hidden_layers) cannot be exported"
        )
    return Geometry(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        max_capacity=positions // 4 * 4,  # TensorRT needs a multiple of 4.
        windows=layer_windows(config),
    )


def rotary_types(config: PretrainedConfig) -> set[str]:
    rope = getattr(config, "rope_parameters", None) or {}
    # In Gemma3's configuration, `rope_parameters` maps each type of layer to its parameters.
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters.get("rope_type", "default") for parameters in by_layer_type or [rope]}


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return how many positions each layer sees, a row's own included; None if all, as for a window
    of `max_position_embeddings` or more."""
    window: int | None = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    if not window or window >= config.max_position_embeddings:
        return (None,) * layers
    if config.model_type in WINDOW_IN_ALL_LAYERS:
        return (window,) * layers
    if config.model_type in WINDOW_BY_LAYER:
        return tuple(window if kind == SLIDING_ATTENTION else None for kind in config.layer_types)
    return (None,) * layers


def attention_masks(
    config: PretrainedConfig, full: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> Masks:
    """Return the masks of a model's layers by positions, because look-ahead rows share positions.
    full [B,1,Q,S] bool: the mask without windows. rows [B or 1,Q], columns [B or 1,S]: positions of
    rows and entries."""
    windows = {window for window in layer_windows(config) if window is not None}
    if not windows:
        return full
    (window,) = windows
    near = full & (rows[:, :, None] - columns[:, None] < window)[:, None]
    return (
        near
        if config.model_type in WINDOW_IN_ALL_LAYERS
        else {FULL_ATTENTION: full, SLIDING_ATTENTION: near}
    )
