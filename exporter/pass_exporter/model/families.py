"""Checks that the exporter supports a model, by its configuration, and reads the model's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from pass_exporter.model.sliding import layer_windows
from pass_runtime.errors import PassError

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text", "olmo2")
"""The supported values of `config.model_type`. Each has a parity test against torch."""

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""The supported types of rotary embeddings, whose frequencies do not depend on a text's length."""

UNSUPPORTED_SETTINGS = {
    "attn_logit_softcapping": "soft-capped attention",
    "final_logit_softcapping": "soft-capped logits",
    "use_bidirectional_attention": "attention in both directions",
}
"""Settings of Gemma3's configuration that the exporter does not support, and what they are."""

MIN_CAPACITY = 16
"""The smallest supported `max_position_embeddings`: an export's checks decode after a prompt."""


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model.

    max_capacity: the largest KV capacity, in tokens; a multiple of 4.
    windows: each layer's sliding window in positions, None if the layer has none.
    """

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
    """Return the types of rotary embeddings that the layers of a model have."""
    rope = getattr(config, "rope_parameters", None) or {}
    # In Gemma3's configuration, `rope_parameters` maps each type of layer to its parameters.
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    return {parameters.get("rope_type", "default") for parameters in by_layer_type or [rope]}
