"""Names and sizes of the tensors of a bundle's graphs. docs/bundle.md says what each of them
holds."""

from __future__ import annotations

from collections.abc import Mapping

PAST, PRESENT = "past_", "present_"
"""The names of the trunk's cache inputs and outputs begin with these."""
LOOKAHEAD_ROWS, HIDDEN_OUTPUT = "lookahead_rows", "hidden"
"""The trunk's input that exists if it has an adapter or a draft head, and the output that a draft
head reads."""
COLUMNS = "columns"
"""An input that only a trunk for TensorRT has. Its length is the number of cache entries that a
pass reads."""
PROCESSED_LOGITS = "processed_logits"
"""The output of the graph of logits processors. After that graph, the tail reads this instead of
`logits`."""
WINDOW_TENSORS = ("input_ids", "next_ids")
"""A tail's tensors with window ids: those of this pass, and those of the next one."""
MODEL_SIZES = ("vocab_size", "hidden_size", "kv_heads", "head_dim")
"""The sizes in `trunk_shapes` that are fields of `pass_runtime.bundle.manifest.ModelInfo`; the
others are symbolic."""
SIZES = (
    *("batch", "width", "logit_rows", "lookahead_rows", "capacity"),
    *("positions", "max_emitted", "processed_rows", "touched"),
)
"""The symbolic sizes of tensors."""


def cache_names(prefix: str, layers: int) -> list[str]:
    """`past_` -> past_key.0 .. past_key.n-1, past_value.0 .. past_value.n-1, in the order of the
    trunk."""
    return [f"{prefix}{part}.{layer}" for part in ("key", "value") for layer in range(layers)]


def trunk_shapes(layers: int) -> Mapping[str, tuple[str, ...]]:
    """The shape of every tensor of a trunk with so many layers, as names of sizes. Not every trunk
    has all of them."""
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
