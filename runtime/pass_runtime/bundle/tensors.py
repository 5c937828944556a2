"""Names and sizes of the tensors of a bundle's graphs, which docs/bundle.md explains."""

from __future__ import annotations

from collections.abc import Mapping

PAST, PRESENT = "past_", "present_"
"""The names of the trunk's cache inputs and outputs begin with these."""
LOOKAHEAD_ROWS, HIDDEN_OUTPUT = "lookahead_rows", "hidden"
"""A trunk's input that exists if there is an adapter or a draft head, and its output that a draft
head reads."""
COLUMNS = "columns"
"""An input that only a trunk for TensorRT has. Its length is the number of cache entries that a
pass reads."""
PROCESSED_LOGITS = "processed_logits"
"""The output of the graph of logits processors. After that graph, the tail reads this instead of
`logits`."""
WINDOW_TENSORS = ("input_ids", "next_ids")
"""A tail's tensors with window ids: of this pass, and of the next."""
MODEL_SIZES = ("vocab_size", "hidden_size", "kv_heads", "head_dim")
"""The sizes in `trunk_shapes` that are fields of `pass_runtime.bundle.manifest.ModelInfo`; the
others are symbolic."""
SIZES = (
    *("batch", "width", "logit_rows", "lookahead_rows", "capacity"),
    *("positions", "max_emitted", "processed_rows", "touched"),
)
"""The symbolic sizes of tensors."""


def cache_names(prefix: str, layers: int) -> list[str]:
    """`past_` -> past_key.0 .. past_key.n-1, past_value.0 .. past_value.n-1, as the trunk orders
    them."""
    return [f"{prefix}{part}.{layer}" for part in ("key", "value") for layer in range(layers)]


def trunk_shapes(layers: int) -> Mapping[str, tuple[str, ...]]:
    """Return the shape, as names of sizes, of every tensor that a trunk with so many layers may
    have."""
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
