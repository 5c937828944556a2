"""Tensors of a bundle's graphs (docs/bundle.md)."""

from __future__ import annotations

from collections.abc import Mapping

PAST, PRESENT = "past_", "present_"
LOOKAHEAD_ROWS, HIDDEN_OUTPUT = "lookahead_rows", "hidden"
"""For an adapter or a draft head, and what a head reads."""
COLUMNS = "columns"
"""A TensorRT trunk's input: its length is the number of entries to read."""
PROCESSED_LOGITS = "processed_logits"
"""The tail reads it in place of `logits`."""
WINDOW_TENSORS = ("input_ids", "next_ids")
MODEL_SIZES = ("vocab_size", "hidden_size", "kv_heads", "head_dim")
"""The sizes that are fields of `manifest.ModelInfo`; others are symbolic."""


def cache_names(prefix: str, layers: int) -> list[str]:
    """In the trunk's order: past_key.0, past_key.1, ..., past_value.0, ..."""
    return [f"{prefix}{part}.{layer}" for part in ("key", "value") for layer in range(layers)]


def trunk_shapes(layers: int) -> Mapping[str, tuple[str, ...]]:
    """Return the symbolic shape of each tensor that a trunk may have."""
    cache = cache_names(PAST, layers) + cache_names(PRESENT, layers)
    return {
        "input_ids": ("batch", "width"),
        "row_position": ("width",),
        "window_mask": ("width", "width"),
        "length": ("batch",),
        "logit_rows": ("logit_rows",),
        LOOKAHEAD_ROWS: ("lookahead_rows",),
        "logits": ("batch", "logit_rows", "vocab_size"),
        HIDDEN_OUTPUT: ("batch", "lookahead_rows", "hidden_size"),
        **dict.fromkeys(cache, ("batch", "kv_heads", "capacity", "head_dim")),
    }
