"""Tails of the `rejection` rule, which is the paper's Algorithm: speculative sampling (Leviathan et al. 2023,
arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)); at the first that is not, the token is drawn
from the normalized positive part of p - q instead, and behind the last draft from p. Tokens are distributed as p.
At temperature 0 a draft is accepted where no other token is as likely, and else the argmax is taken: the same tokens as
by the `match` rule.

As the tails in `tail`, with these inputs and outputs besides:

    accept_offsets, draft_offsets [B,N,2] int64   noise of their own for accepting and for drafting (`noise.STREAMS`)
    draft_probs                   [B,D,V] float32 what each draft was drawn from; 0 for a draft that is missing
 -> next_draft_probs              [B,D',V] float32 the same for the drafts in `next_ids`; may share its memory,
                                                  and a parked row keeps it where it keeps its window
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.head import head_drafts
from pass_exporter.tails.match import advance, is_active, unless_parked
from pass_exporter.tails.rows import columns, fused_rows, leading, left_rows, per_batch, pick_rows
from pass_exporter.tails.sampler import draw, is_noisy, uniform, weights
from pass_exporter.tails.tape import GraphTape, Output
from pass_runtime.bundle.head import Head
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


def build_rejection_tail(plan: Plan, sampler: Sampler, vocab_size: int, head: Head | None = None) -> ir.Model:
    """The tail of `plan`, which is not greedy, preparing the window of `plan.next`, with the drafts of `head`."""
    op = GraphTape(f"tail.{plan.tail}.{sampler}.rejection")
    width: int | str = "width" if plan.is_fused else plan.width
    logits = op.input("logits", np.float32, ["batch", width, vocab_size])
    length = op.input("length", np.int64, ["batch"])
    chain = plan.drafts + 1
    p = weights(op, sampler, columns(op, logits, 0, chain), chain, vocab_size, normalized=True)  # [B,chain,V]
    accepted, drafts = _accepted(op, plan, p, length, width, vocab_size)  # [B,1], [B,D] or None
    count, next_length = advance(op, length, accepted)
    # From here on, positions come from next_length: it may lie where `length` was.
    root = draw(op, _target(op, plan, p, accepted, vocab_size), next_length, [-1], "noise_offsets", vocab_size)  # [B,1]
    outputs: dict[str, Output] = {
        "emitted": (_emitted(op, plan, drafts, accepted, root), np.int64, ["batch", plan.max_emitted]),
        "count": (count, np.int64, ["batch"]),
    }
    parts, after = [root], plan.next
    if after.drafts:
        next_drafts, q = _next_drafts(op, plan, sampler, logits, accepted, root, next_length, vocab_size, head)
        parts.append(next_drafts)
        outputs["next_draft_probs"] = (q, np.float32, ["batch", after.drafts, vocab_size])
    if after.groups:
        ids = fused_rows(op) if plan.is_fused else op.const(after.lookahead_ids(vocab_size)[None])
        parts.append(per_batch(op, root, ids))
    window = unless_parked(op, plan, op("Concat", *parts, axis=1), width)
    outputs["next_ids"] = (window, np.int64, ["batch", "width" if plan.is_fused else after.width])
    outputs["next_length"] = (next_length, np.int64, ["batch"])
    return op.model(outputs)


def _accepted(
    op: GraphTape, plan: Plan, p: ir.Value, length: ir.Value, width: int | str, vocab_size: int
) -> tuple[ir.Value, ir.Value | None]:
    """[B,1]: leading drafts x with u q(x) <= p(x), and at temperature 0 with p(x) = 1; and the drafts [B,D]."""
    if plan.drafts == 0:
        return op("Mul", op("Unsqueeze", length, op.const([1])), op.const(0)), None
    ids = columns(op, op.input("input_ids", np.int64, ["batch", width]), 1, 1 + plan.drafts)
    q = op.input("draft_probs", np.float32, ["batch", plan.drafts, vocab_size])
    known = op("Less", ids, op.const(vocab_size))
    token = op("Unsqueeze", op("Where", known, ids, op.const(0)), op.const([2]))  # [B,D,1]
    p_x = op("GatherElements", columns(op, p, 0, plan.drafts), token, axis=2)
    q_x = op("GatherElements", q, token, axis=2)
    u = uniform(op, length, list(range(plan.drafts)), "accept_offsets", vocab_size)  # [B,D,1]
    fits = op("LessOrEqual", op("Mul", u, q_x), p_x)
    alone = op("Greater", p_x, op.const(0.75, np.float32))  # tokens that tie have a half each, or less
    fits = op("And", fits, op("Or", is_noisy(op), alone))
    return leading(op, op("And", op("Squeeze", fits, op.const([2])), known), plan.drafts), ids


def _target(op: GraphTape, plan: Plan, p: ir.Value, accepted: ir.Value, vocab_size: int) -> ir.Value:
    """[B,1,V]: what the token behind the accepted drafts is drawn from, not normalized."""
    if plan.drafts == 0:
        return p
    here = pick_rows(op, p, accepted, plan.drafts + 1, vocab_size)
    q = op.input("draft_probs", np.float32, ["batch", plan.drafts, vocab_size])
    last = op.const(plan.drafts - 1)
    drawn_from = pick_rows(op, q, op("Min", accepted, last), plan.drafts, vocab_size)
    behind = op("Unsqueeze", op("Greater", accepted, last), op.const([2]))  # no draft stands there
    drawn = op("And", is_noisy(op), op("Not", behind))
    return residual(op, here, op("Where", drawn, drawn_from, op.const(0, np.float32)))


def residual(op: GraphTape, p: ir.Value, q: ir.Value) -> ir.Value:
    """max(p - q, 0) [B,1,V]; p where rounding leaves nothing of it."""
    positive = op("Max", op("Sub", p, q), op.const(0, np.float32))
    some = op("Greater", op("ReduceMax", positive, op.const([2]), keepdims=1), op.const(0, np.float32))
    return op("Where", some, positive, p)


def _emitted(op: GraphTape, plan: Plan, drafts: ir.Value | None, accepted: ir.Value, root: ir.Value) -> ir.Value:
    """[B,E]: the accepted drafts, then the new root (again and again: only `count` of them are valid)."""
    if drafts is None:
        return root
    padded = op("Concat", drafts, root, axis=1)
    return op("Where", op("Less", op.const(np.arange(plan.max_emitted)[None]), accepted), padded, root)


def _next_drafts(
    op: GraphTape,
    plan: Plan,
    sampler: Sampler,
    logits: ir.Value,
    accepted: ir.Value,
    root: ir.Value,
    root_position: ir.Value,
    vocab_size: int,
    head: Head | None,
) -> tuple[ir.Value, ir.Value]:
    """The next window's drafts [B,D'], id V where there is none, and what they were drawn from [B,D',V]."""
    count = plan.next.drafts
    # Through `root`, so that whoever reads draft_probs has run before next_draft_probs is written over it.
    after_root = op("Add", accepted, op("Mul", root, op.const(0)))
    rows, chosen = left_rows(op, plan, logits, after_root, vocab_size)

    def draw_from(values: ir.Value, depth: list[int]) -> tuple[ir.Value, ir.Value]:
        q = weights(op, sampler, values, len(depth), vocab_size, normalized=True)
        return draw(op, q, root_position, depth, "draft_offsets", vocab_size), q

    if head is None:
        drafts, q = draw_from(chosen, list(range(count)))
    else:
        parts: list[ir.Value] = []

        def draw_one(row: ir.Value, j: int) -> ir.Value:
            token, of_row = draw_from(row, [j])
            parts.append(of_row)
            return token

        drafts = head_drafts(op, head, plan, sampler, chosen, rows, root, draw_one)
        q = op("Concat", *parts, axis=1)
    missing = op("Equal", rows, op.const(0))
    q = op("Where", op("Unsqueeze", missing, op.const([2])), op.const(0, np.float32), q)
    if plan.is_fused:
        before = op.input("draft_probs", np.float32, ["batch", count, vocab_size])
        q = op("Where", is_active(op, [1, 2]), q, before)
    return op("Where", missing, op.const(vocab_size), drafts), q
