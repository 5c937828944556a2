"""Sliding windows: attention layers that see the last positions of a text only.

The cache keeps every position in every layer. What a layer with a window must not see is left out by its mask, which is
made from positions: look-ahead rows, and drafts of one depth, share positions that are not their places in the cache.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

IN_ALL_LAYERS = ("mistral", "phi3")
BY_LAYER = ("qwen2", "qwen3", "gemma3_text")
"""Families in which `layer_types` says which layers have the window; transformers takes a mask of each type."""
FULL, SLIDING = "full_attention", "sliding_attention"

Masks = torch.Tensor | dict[str, torch.Tensor]
"""What a decoder of transformers takes as its `attention_mask`."""


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return for each layer the number of positions that a row sees, its own among them; None where it sees all.

    A window as long as the longest sequence is none.
    """
    window: int | None = getattr(config, "sliding_window", None)
    layers = int(config.num_hidden_layers)
    if not window or window >= config.max_position_embeddings:
        return (None,) * layers
    if config.model_type in IN_ALL_LAYERS:
        return (window,) * layers
    if config.model_type in BY_LAYER:
        return tuple(window if kind == SLIDING else None for kind in config.layer_types)
    return (None,) * layers


def attention_masks(config: PretrainedConfig, full: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> Masks:
    """Return the masks of a model's layers.

    full [B,1,Q,S] bool: what rows see without a window. rows [B or 1,Q], columns [B or 1,S]: their positions, from any
    beginning.
    """
    windows = {window for window in layer_windows(config) if window is not None}
    if not windows:
        return full
    (window,) = windows
    near = full & (rows[:, :, None] - columns[:, None] < window)[:, None]
    return near if config.model_type in IN_ALL_LAYERS else {FULL: full, SLIDING: near}
