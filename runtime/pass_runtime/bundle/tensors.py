"""What the tensors of tails are, by name: see the tables of the bundle format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from pass_runtime.bundle.noise import STREAMS
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import MAX_LOGPROBS

Kind: TypeAlias = tuple[str, tuple[int | str, ...]]
"""dtype and shape, as `pass_runtime.bundle.manifest.Tensor` has them."""


def tail_tensors(plan: Plan, vocab_size: int, hidden_size: int) -> Mapping[str, Kind]:
    """Every tensor that a tail of `plan` may have. Fused tails serve windows of any groups, so theirs are symbolic."""
    window, after = ("width", "width") if plan.is_fused else (plan.width, plan.next.width)
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
        "draft_rows": ("int64", (plan.drafts + 1, plan.drafts)),
        "lookahead_ids": ("int64", ("lookahead_rows",)),
        "hidden": ("float32", ("batch", lookahead_rows, hidden_size)),
        "emitted": ("int64", ("batch", plan.max_emitted)),
        "count": slots,
        "next_ids": ("int64", ("batch", after)),
        "next_length": slots,
        "next_draft_probs": ("float32", ("batch", plan.next.drafts, vocab_size)),
    }


def logprobs_tensors(vocab_size: int) -> Mapping[str, Kind]:
    """Those of the graph of log-probabilities."""
    most = ("batch", "max_emitted", min(MAX_LOGPROBS, vocab_size))
    return {
        "logits": ("float32", ("batch", "width", vocab_size)),
        "emitted": ("int64", ("batch", "max_emitted")),
        "chosen_logprob": ("float32", ("batch", "max_emitted")),
        "top_ids": ("int64", most),
        "top_logprobs": ("float32", most),
    }
