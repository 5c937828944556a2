"""Builds tails for the `rejection` rule, which the PaSS paper uses: speculative sampling (Leviathan
et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Let p be the model's distribution of the next token, and q the one that a draft x was drawn from. x
is accepted with probability min(1, p(x) / q(x)). The first rejected draft is replaced by a token
drawn from the normalized positive part of p - q. If all drafts are accepted, one more token is
drawn from p. All tokens are then distributed as p. At temperature 0 a draft is accepted if it is
the only most likely token, and otherwise replaced by the argmax: the tokens are those of the
exact-match rule.

Inputs and outputs are those of `tails.match`, and these:

    accept_offsets, draft_offsets [B,N,2] int64    noise of accepting and drafting (`noise.STREAMS`)
    draft_probs                   [B,D,V] float32  each draft's q; 0 if the draft is missing
 -> next_draft_probs              [B,D',V] float32 each q of the drafts in `next_ids`; may share
                                                   memory with draft_probs. A masked slot that keeps
                                                   its window keeps its draft_probs, too
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, count_leading, run_after, slice_rows
from pass_exporter.tails.head import Choices, head_drafts
from pass_exporter.tails.tape import GraphTape, Output
from pass_exporter.tails.window_noise import WindowNoise
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler

F32 = np.float32


def build_rejection_tail(
    plan: Plan, sampler: Sampler, vocab_size: int, head: HeadArrays | None = None
) -> ir.Model:
    """Build the tail of `plan` for the rejection rule.

    sampler: any but greedy. head: the draft head, which makes the drafts; None if there is none.
    """
    tail = TailBuilder(f"tail.{plan.tail}.{sampler}.rejection", plan, sampler, vocab_size, head)
    op, verified = tail.op, plan.drafts + 1
    # [B,D+1,V]
    p = tail.sampler.weights(slice_rows(op, tail.logits, 0, verified), verified, normalized=True)
    accepted, drafts = _accepted(tail, p)  # [B,1], and [B,D] or None
    count, next_length = tail.advance(accepted)
    # From here on positions come from next_length, which may be written over the input `length`.
    before_root = op("Sub", next_length, op.const(1))  # The new root is at next_length.
    noise_of = WindowNoise.after(tail, before_root, 1, "noise_offsets").at([0])
    root = tail.sampler.draw(_target(tail, p, accepted), noise_of, 1)  # [B,1]
    outputs: dict[str, Output] = {
        "emitted": (_emitted(tail, drafts, accepted, root), np.int64, ["batch", plan.max_emitted]),
        "count": (count, np.int64, ["batch"]),
    }
    next_drafts = None
    if plan.next.drafts:
        next_drafts, q = _next_drafts(tail, accepted, root, next_length)
        outputs["next_draft_probs"] = (q, F32, ["batch", plan.next.drafts, vocab_size])
    next_ids = tail.next_window(root, next_drafts)
    outputs["next_ids"] = (next_ids, np.int64, ["batch", tail.next_width])
    outputs["next_length"] = (next_length, np.int64, ["batch"])
    return op.model(outputs)


def _accepted(tail: TailBuilder, p: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Return the number [B,1] of leading drafts x that are accepted, and the drafts [B,D].

    A draft is accepted if u q(x) <= p(x) for a uniform u; at temperature 0 also p(x) must be 1.
    """
    op, count = tail.op, tail.plan.drafts
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
    # At temperature 0 p(x) is 1, or at most 0.5 for each of several tied tokens.
    is_only = op("Greater", p_x, op.const(0.75, F32))
    is_accepted = op("And", is_accepted, op("Or", tail.sampler.is_noisy(), is_only))
    is_accepted = op("And", op("Squeeze", is_accepted, op.const([2])), exists)
    return count_leading(op, is_accepted, count), ids


def _target(tail: TailBuilder, p: ir.Value, accepted: ir.Value) -> ir.Value:
    """Return the unnormalized distribution [B,1,V] of the token after the accepted drafts: the
    positive part of p - q if a draft was rejected at a temperature above 0, otherwise p."""
    op, count = tail.op, tail.plan.drafts
    if count == 0:
        return p
    p_row = tail.pick_rows(p, accepted, count + 1, tail.vocab_size)
    q, last = tail.draft_probs(), op.const(count - 1)
    q_row = tail.pick_rows(q, op("Min", accepted, last), count, tail.vocab_size)
    all_accepted = op("Unsqueeze", op("Greater", accepted, last), op.const([2]))
    is_residual = op("And", tail.sampler.is_noisy(), op("Not", all_accepted))
    return residual(op, p_row, op("Where", is_residual, q_row, op.const(0, F32)))


def residual(op: GraphTape, p: ir.Value, q: ir.Value) -> ir.Value:
    """Return max(p - q, 0) [B,1,V]; p if rounding makes all of it 0."""
    positive = op("Max", op("Sub", p, q), op.const(0, F32))
    any_positive = op(
        "Greater", op("ReduceMax", positive, op.const([2]), keepdims=1), op.const(0, F32)
    )
    return op("Where", any_positive, positive, p)


def _emitted(
    tail: TailBuilder, drafts: ir.Value | None, accepted: ir.Value, root: ir.Value
) -> ir.Value:
    """Return `emitted` [B,E]: the accepted drafts, then the new root in all remaining entries."""
    if drafts is None:
        return root
    op = tail.op
    padded = op("Concat", drafts, root, axis=1)  # [B,E]
    is_draft = op("Less", op.const(np.arange(tail.plan.max_emitted)[None]), accepted)
    return op("Where", is_draft, padded, root)


def _next_drafts(
    tail: TailBuilder, accepted: ir.Value, root: ir.Value, root_position: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Return the next window's drafts [B,D'] and their distributions [B,D',V].

    The id of a missing draft is V.
    """
    op, plan = tail.op, tail.plan
    # `root` is computed from draft_probs, which next_draft_probs may overwrite, so it comes first.
    # A row [B,D'] of 0 says that no look-ahead row makes the draft: it is missing.
    rows, logits = tail.group_rows(run_after(op, accepted, root))

    window = WindowNoise.after(tail, root_position, plan.next.drafts, "draft_offsets")

    def draw(values: ir.Value, indices: list[int]) -> tuple[ir.Value, ir.Value]:
        """Draw the drafts `indices` from their logits; return them and their distributions."""
        q = tail.sampler.weights(values, len(indices), normalized=True)
        return tail.sampler.draw(q, window.at(indices), len(indices)), q

    if tail.head is None:
        drafts, q = draw(logits, list(range(plan.next.drafts)))
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
    if plan.is_fused:  # A masked slot keeps its window, and so its drafts' distributions.
        q = op("Where", tail.is_active([1, 2]), q, tail.draft_probs())
    return op("Where", missing, op.const(tail.vocab_size), drafts), q
