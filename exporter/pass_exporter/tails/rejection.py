"""Builds tails for the paper's `rejection` rule: speculative sampling (arXiv 2211.17192).

A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)). A token drawn from the
positive part of p - q replaces the first rejected one; if all are accepted, another is drawn
from p. At temperature 0 the tokens are as with the exact-match rule.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import (
    TailBuilder,
    WindowNoise,
    count_leading,
    run_after,
    slice_rows,
)
from pass_exporter.tails.head_drafts import Choices, head_drafts
from pass_exporter.tails.tape import GraphTape, Output
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.window import Window

F32 = np.float32


def build_rejection_tail(
    window: Window, sampler: Sampler, vocab_size: int, head: HeadArrays | None = None
) -> ir.Model:
    """sampler: any but greedy."""
    tail = TailBuilder(f"tail.{window.tail}.{sampler}.rejection", window, sampler, vocab_size, head)
    op, verified = tail.op, window.drafts + 1
    # [B,D+1,V]
    p = tail.sampler.weights(slice_rows(op, tail.logits, 0, verified), verified, normalized=True)
    accepted, drafts = _accepted(tail, p)  # [B,1], and [B,D] or None
    count, next_length = tail.advance(accepted)
    # Positions now come from next_length, which may overwrite the input `length`.
    before_root = op("Sub", next_length, op.const(1))  # The new root is at next_length.
    noise_of = WindowNoise.after(tail, before_root, 1, "noise_offsets").at([0])
    root = tail.sampler.draw(_target(tail, p, accepted), noise_of, 1)  # [B,1]
    outputs: dict[str, Output] = {
        "emitted": (
            _emitted(tail, drafts, accepted, root),
            np.int64,
            ["batch", window.max_emitted],
        ),
        "count": (count, np.int64, ["batch"]),
    }
    next_drafts = None
    if window.next.drafts:
        next_drafts, q = _next_drafts(tail, accepted, root, next_length)
        outputs["next_draft_probs"] = (q, F32, ["batch", window.next.drafts, vocab_size])
    next_ids = tail.next_window(root, next_drafts)
    outputs["next_ids"] = (next_ids, np.int64, ["batch", tail.next_width])
    outputs["next_length"] = (next_length, np.int64, ["batch"])
    return op.model(outputs)


def _accepted(tail: TailBuilder, p: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Count [B,1] the leading drafts x with u q(x) <= p(x); return them [B,D], too."""
    op, count = tail.op, tail.window.drafts
    if count == 0:
        return op("Mul", op("Unsqueeze", tail.length, op.const([1])), op.const(0)), None
    ids = slice_rows(op, tail.input_ids(), 1, 1 + count)
    q = tail.draft_probs()
    exists = op("Less", ids, op.const(tail.vocab_size))  # A missing draft has the id V.
    x = op("Unsqueeze", op("Where", exists, ids, op.const(0)), op.const([2]))  # [B,D,1]
    p_x = op("GatherElements", slice_rows(op, p, 0, count), x, axis=2)
    q_x = op("GatherElements", q, x, axis=2)
    u = tail.sampler.noise.uniform(tail.length, count, "accept_offsets")  # [B,D,1]
    is_accepted = op("LessOrEqual", op("Mul", u, q_x), p_x)
    # At temperature 0 p(x) is 1, or at most 0.5 for tied tokens.
    is_only = op("Greater", p_x, op.const(0.75, F32))
    is_accepted = op("And", is_accepted, op("Or", tail.sampler.is_noisy(), is_only))
    is_accepted = op("And", op("Squeeze", is_accepted, op.const([2])), exists)
    return count_leading(op, is_accepted, count), ids


def _target(tail: TailBuilder, p: ir.Value, accepted: ir.Value) -> ir.Value:
    op, count = tail.op, tail.window.drafts
    if count == 0:
        return p
    p_row = tail.pick_rows(p, accepted, count + 1, tail.vocab_size)
    q, last = tail.draft_probs(), op.const(count - 1)
    q_row = tail.pick_rows(q, op("Min", accepted, last), count, tail.vocab_size)
    all_accepted = op("Unsqueeze", op("Greater", accepted, last), op.const([2]))
    is_residual = op("And", tail.sampler.is_noisy(), op("Not", all_accepted))
    return residual(op, p_row, op("Where", is_residual, q_row, op.const(0, F32)))


def residual(op: GraphTape, p: ir.Value, q: ir.Value) -> ir.Value:
    """max(p - q, 0) [B,1,V]; p if rounding leaves 0."""
    positive = op("Max", op("Sub", p, q), op.const(0, F32))
    any_positive = op(
        "Greater", op("ReduceMax", positive, op.const([2]), keepdims=1), op.const(0, F32)
    )
    return op("Where", any_positive, positive, p)


def _emitted(
    tail: TailBuilder, drafts: ir.Value | None, accepted: ir.Value, root: ir.Value
) -> ir.Value:
    if drafts is None:
        return root
    op = tail.op
    padded = op("Concat", drafts, root, axis=1)  # [B,E]
    is_draft = op("Less", op.const(np.arange(tail.window.max_emitted)[None]), accepted)
    return op("Where", is_draft, padded, root)


def _next_drafts(
    tail: TailBuilder, accepted: ir.Value, root: ir.Value, root_position: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the next drafts [B,D'], V if missing, and their distributions [B,D',V]."""
    op, window = tail.op, tail.window
    # `root` comes first: next_draft_probs may overwrite draft_probs. A row of 0 makes no draft.
    rows, logits = tail.group_rows(run_after(op, accepted, root))

    random = WindowNoise.after(tail, root_position, window.next.drafts, "draft_offsets")

    def draw(values: ir.Value, indices: list[int]) -> tuple[ir.Value, ir.Value]:
        q = tail.sampler.weights(values, len(indices), normalized=True)
        return tail.sampler.draw(q, random.at(indices), len(indices)), q

    if tail.head is None:
        drafts, q = draw(logits, list(range(window.next.drafts)))
    else:
        distributions: list[ir.Value] = []

        def choose(choices: Choices, scores: ir.Value, j: int) -> ir.Value:
            token, distribution = draw(choices.vocabulary_logits(j, scores, tail.vocab_size), [j])
            distributions.append(distribution)
            return op("Unsqueeze", token, op.const([2]))

        drafts = head_drafts(tail, logits, rows, root, choose)
        q = op("Concat", *distributions, axis=1)
    missing = op("Equal", rows, op.const(0))
    q = op("Where", op("Unsqueeze", missing, op.const([2])), op.const(0, F32), q)
    if window.is_fused:  # A masked slot keeps its window and its drafts' distributions.
        q = op("Where", tail.is_active([1, 2]), q, tail.draft_probs())
    return op("Where", missing, op.const(tail.vocab_size), drafts), q
