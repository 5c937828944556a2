"""Names and symbolic sizes of the tensors of a bundle's graphs. docs/bundle.md explains them."""

from __future__ import annotations

from collections.abc import Mapping

PAST, PRESENT = "past_", "present_"
"""The beginnings of the names of the trunk's inputs and outputs that are the KV cache."""
LOOKAHEAD_ROWS, HIDDEN_OUTPUT = "lookahead_rows", "hidden"
"""The input of a trunk with an adapter or a draft head, and the output that a draft head reads."""
COLUMNS = "columns"
"""An input of trunks for TensorRT, whose length says how many cache entries a pass reads."""
PROCESSED_LOGITS = "processed_logits"
"""The output of the logits processors, which the tail then reads in place of `logits`."""
WINDOW_TENSORS = ("input_ids", "next_ids")
"""A tail's tensors with the ids of a window: this pass's, and the next one's."""
MODEL_SIZES = ("vocab_size", "hidden_size", "kv_heads", "head_dim")
"""The sizes in `trunk_shapes` that are fields of `manifest.ModelInfo`; the others are symbolic."""
SIZES = (
    *("batch", "width", "logit_rows", "lookahead_rows", "capacity"),
    *("positions", "max_emitted", "processed_rows", "touched"),
)
"""The symbolic sizes that a tensor's shape in a manifest may have (see `manifest.Tensor`)."""


def cache_names(prefix: str, layers: int) -> list[str]:
    """Return the names of a trunk's cache tensors in the trunk's order: for PAST they are
    past_key.0, past_key.1, ..., past_value.0, past_value.1, ..."""
    return [f"{prefix}{part}.{layer}" for part in ("key", "value") for layer in range(layers)]


def trunk_shapes(layers: int) -> Mapping[str, tuple[str, ...]]:
    """Return, by name, the shape (names of sizes) of each tensor that a trunk may have."""
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
