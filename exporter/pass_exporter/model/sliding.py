"""Makes the masks of layers with a sliding window, which see only the last positions of a text.

The cache keeps every position in every layer, and a mask hides those outside of a layer's window.
The mask is computed from the positions of the entries and not from their order in the cache,
because look-ahead rows, and drafts of one depth, share positions.
"""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

WINDOW_IN_ALL_LAYERS = ("mistral", "phi3")
"""The families in which all layers have the window of the setting `sliding_window`."""
WINDOW_BY_LAYER = ("qwen2", "qwen3", "gemma3_text")
"""The families whose setting `layer_types` says which layers have the window. Their decoders take a
mask for each type of layer."""
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"

Masks = torch.Tensor | dict[str, torch.Tensor]
"""The `attention_mask` of transformers' decoders: one mask, or one for each type of layer."""


def layer_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's sliding window: how many positions a row sees, its own included; None if
    it sees all. A window of `max_position_embeddings` or more hides nothing, so that is None too.
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

    full [B,1,Q,S] bool: the mask of layers without a sliding window.
    rows [B or 1,Q], columns [B or 1,S]: the positions of the rows and of the cache entries. Only
    their differences matter.
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
