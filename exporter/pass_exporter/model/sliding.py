"""Sliding windows: attention layers that see only the last positions of a text.

The cache keeps every position in every layer, and a mask hides those outside of a layer's window.
The mask is computed from positions, not from places in the cache: look-ahead rows, and drafts of
one depth, share positions.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

WINDOW_IN_ALL_LAYERS = ("mistral", "phi3")
WINDOW_BY_LAYER = ("qwen2", "qwen3", "gemma3_text")
"""Families whose `layer_types` names the layers with the window; decoders take a mask by type."""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

Masks = torch.Tensor | dict[str, torch.Tensor]
"""The `attention_mask` of transformers' decoders: one mask, or one for each type of layer."""


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return for each layer how many positions a row sees, its own included; None for all.

    A window that is not shorter than `max_position_embeddings` counts as none.
    """
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
    """Return the masks of a model's layers.

    full [B,1,Q,S] bool: the mask of layers without a sliding window. rows [B or 1,Q], columns [B or
    1,S]: positions, both relative to the same origin.
    """
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
