"""Every tensor of a bundle's graphs: its name, dtype and shape. docs/bundle.md says what each of them holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pass_runtime.bundle.noise import STREAMS
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.request_fields import MAX_LOGPROBS

Kind: TypeAlias = tuple[str, tuple[int | str, ...]]
"""dtype and shape, as `pass_runtime.bundle.manifest.Tensor` has them."""

PAST, PRESENT = "past_", "present_"
"""The names of the trunk's cache inputs and outputs begin with these."""
ROWS_INPUT, HIDDEN_OUTPUT = "lookahead_rows", "hidden"
"""The trunk's input that an adapter or a draft head needs, and the output that a draft head reads."""
COLUMNS = "columns"
"""An input that only a trunk for TensorRT has. Its length says how many cache entries a pass reads."""
PROCESSED_LOGITS = "processed_logits"
"""What the graph of logits processors writes. The tail of a pass that has one reads it in place of `logits`."""
WINDOWS = ("input_ids", "next_ids")
"""A tail's windows: the one that the pass ran, and the next one."""
MODEL_SIZES = ("vocab_size", "hidden_size", "kv_heads", "head_dim")
"""The sizes in `trunk_shapes` that are fields of `pass_runtime.bundle.manifest.ModelInfo`; the others are symbolic."""


def cache_names(prefix: str, layers: int) -> list[str]:
    """`past_` -> past_key.0 .. past_key.n-1, past_value.0 .. past_value.n-1, in the order of the trunk."""
    return [f"{prefix}{part}.{layer}" for part in ("key", "value") for layer in range(layers)]


def trunk_shapes(layers: int) -> Mapping[str, tuple[str, ...]]:
    """The shape of every tensor that a trunk with so many layers may have, as the names of its sizes."""
    cache = cache_names(PAST, layers) + cache_names(PRESENT, layers)
    return {
        "input_ids": ("batch", "width"),
        "row_position": ("width",),
        "window_mask": ("width", "width"),
        "length": ("batch",),
        "logit_rows": ("logit_rows",),
        ROWS_INPUT: ("lookahead_rows",),
        "logits": ("batch", "logit_rows", "vocab_size"),
        HIDDEN_OUTPUT: ("batch", "lookahead_rows", "hidden_size"),
        **dict.fromkeys(cache, ("batch", "kv_heads", "capacity", "head_dim")),
    }


def tail_tensors(plan: Plan, vocab_size: int, hidden_size: int) -> Mapping[str, Kind]:
    """Every tensor that a tail of `plan` may have. A fused tail serves windows with any groups, so its window width is
    symbolic."""
    window, next_window = ("width", "width") if plan.is_fused else (plan.width, plan.next.width)
    lookahead_rows = "lookahead_rows" if plan.is_fused else len(plan.lookahead_rows)
    slots: Kind = ("int64", ("batch",))
    parameter: Kind = ("float32", ("batch",))
    return {
        "logits": ("float32", ("batch", window, vocab_size)),
        "input_ids": ("int64", ("batch", window)),
        "length": slots,
        "active": slots,
        "temperature": parameter,
        "top_k": slots,
        "top_p": parameter,
        "min_p": parameter,
        **dict.fromkeys(STREAMS, ("int64", ("batch", "positions", 2))),
        "draft_probs": ("float32", ("batch", plan.drafts, vocab_size)),
        "draft_rows": ("int64", (plan.drafts + 1, plan.next.depth)),
        "lookahead_ids": ("int64", ("lookahead_rows",)),
        "hidden": ("float32", ("batch", lookahead_rows, hidden_size)),
        "emitted": ("int64", ("batch", plan.max_emitted)),
        "emitted_rows": ("int64", ("batch", plan.max_emitted)),
        "count": slots,
        "next_ids": ("int64", ("batch", next_window)),
        "next_length": slots,
        "next_draft_probs": ("float32", ("batch", plan.next.drafts, vocab_size)),
    }


def logprobs_tensors(vocab_size: int) -> Mapping[str, Kind]:
    """Every tensor of the graph of log-probabilities."""
    most = ("batch", "max_emitted", min(MAX_LOGPROBS, vocab_size))
    return {
        "logits": ("float32", ("batch", "width", vocab_size)),
        "emitted": ("int64", ("batch", "max_emitted")),
        "chosen_logprob": ("float32", ("batch", "max_emitted")),
        "top_ids": ("int64", most),
        "top_logprobs": ("float32", most),
    }


def processors_tensors(vocab_size: int) -> Mapping[str, Kind]:
    """Every tensor of the graph of logits processors."""
    logits: Kind = ("float32", ("batch", "width", vocab_size))
    by_row: Kind = ("float32", ("batch", "processed_rows", "touched"))
    return {
        "logits": logits,
        "allowed": ("int32", ("batch", "processed_rows", -(-vocab_size // 8))),
        "touched": ("int64", ("batch", "touched")),
        "bias": ("float32", ("batch", "touched")),
        "factor": by_row,
        "penalty": by_row,
        PROCESSED_LOGITS: logits,
    }
