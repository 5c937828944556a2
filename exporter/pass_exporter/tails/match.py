"""tail.<plan>.<sampler>.onnx: sample, compare, accept, and lay out the next window. Every decision is made here.

Contract (B batch, R = Q window rows, N listed positions; only the inputs a tail reads are in its graph):

    logits         [B,R,V] float32   the trunk's, one row per window row
    input_ids      [B,Q] int64       the window that was run
    length         [B] int64         valid KV entries before the pass
    active         [B] int64         1 takes part, 0 is parked
    temperature    [B] float32       sampling tails
    noise_offsets  [B,N,2] int64     sampling tails: `pass_runtime.bundle.noise.noise_offsets` of positions 0..N-1
    top_k          [B] int64, 0 off  truncated tail
    top_p          [B] float32       truncated tail
    min_p          [B] float32       truncated tail
    draft_rows     [D+1,D] int64     fused tails: `Plan.draft_rows`
    lookahead_ids  [A] int64         fused tails: the look-ahead ids of the window, which are the next one's too
    hidden         [B,A,H] float32   tails that draft with a head: see `tails.head`
 -> emitted        [B,E] int64       new tokens; the first `count` of them are valid
    count          [B] int64         accepted drafts and the bonus token: 1..E; 0 where parked
    next_ids       [B,Q'] int64      the next plan's window
    next_length    [B] int64         length + count

A fused tail serves every choice of groups, so its Q is symbolic. A draft that no group left is id V in `next_ids`:
no sample equals it, so it is never accepted.

A parked row emits nothing and keeps its length. Where the plan repeats (ar, fused) it keeps its window too; otherwise
what `next_ids` holds of it is of no use. It is computed as the others are, so the listed positions must cover it.

`next_ids` and `next_length` may share memory with `input_ids` and `length`: every reader of the inputs is an
ancestor of the node that writes the outputs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.head import head_drafts
from pass_exporter.tails.rows import columns, fused_rows, leading, left_rows, per_batch
from pass_exporter.tails.sampler import draw_among, sample_rows
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.head import Head
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


def build_tail(plan: Plan, sampler: Sampler, vocab_size: int, head: Head | None = None) -> ir.Model:
    """The tail of `plan`, preparing the window of `plan.next`. `head` makes its drafts, where there are some."""
    op = GraphTape(f"tail.{plan.tail}.{sampler}")
    width: int | str = "width" if plan.is_fused else plan.width
    logits = op.input("logits", np.float32, ["batch", width, vocab_size])
    length = op.input("length", np.int64, ["batch"])
    # A fused pass samples its look-ahead rows once it is known which group counts, a head once the new root is.
    drafts_later = plan.is_fused or (head is not None and plan.next.drafts > 0)
    rows = plan.drafts + 1 if drafts_later else plan.width
    sampled = columns(op, logits, 0, rows) if drafts_later else logits
    samples = sample_rows(op, sampler, sampled, length, plan.row_position[:rows].tolist(), vocab_size)  # [B,rows]
    emitted = columns(op, samples, 0, plan.max_emitted)
    accepted = _accepted(op, plan, emitted, width)  # [B,1]
    count, next_length = advance(op, length, accepted)
    root = op("GatherElements", emitted, accepted, axis=1)
    if drafts_later:
        parts = [root, _later_drafts(op, plan, sampler, logits, accepted, root, next_length, vocab_size, head)]
        parts += [per_batch(op, root, fused_rows(op))] if plan.is_fused else []
        next_ids = op("Concat", *parts, axis=1)
    else:
        next_ids = _next_window(op, plan.next, samples, root, vocab_size)
    next_ids = unless_parked(op, plan, next_ids, width)
    return op.model(
        {
            "emitted": (emitted, np.int64, ["batch", plan.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (next_ids, np.int64, ["batch", "width" if plan.is_fused else plan.next.width]),
            "next_length": (next_length, np.int64, ["batch"]),
        }
    )


def _accepted(op: GraphTape, plan: Plan, emitted: ir.Value, width: int | str) -> ir.Value:
    """[B,1]: how many leading drafts equal the model's own choice (the `match` rule)."""
    if plan.drafts == 0:
        return op("Mul", columns(op, emitted, 0, 1), op.const(0))
    input_ids = op.input("input_ids", np.int64, ["batch", width])
    drafts = columns(op, input_ids, 1, 1 + plan.drafts)
    equal = op("Equal", columns(op, emitted, 0, plan.drafts), drafts)
    return leading(op, equal, plan.drafts)


def advance(op: GraphTape, length: ir.Value, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
    """length [B], accepted [B,1] -> count and next_length [B]."""
    count = op("Add", op("Squeeze", accepted, op.const([1])), op.const(1))
    count = op("Mul", count, op.input("active", np.int64, ["batch"]))
    return count, op("Add", length, count)


def unless_parked(op: GraphTape, plan: Plan, window: ir.Value, width: int | str) -> ir.Value:
    """[B,Q']: `window`; of a parked row the one that was run, where the next pass has the same plan."""
    if plan.next != plan:
        return window
    return op("Where", is_active(op, [1]), window, op.input("input_ids", np.int64, ["batch", width]))


def is_active(op: GraphTape, axes: list[int]) -> ir.Value:
    """[B,1,...] bool, with new `axes`."""
    active = op.input("active", np.int64, ["batch"])
    return op("Unsqueeze", op("Greater", active, op.const(0)), op.const(axes))


def _next_window(op: GraphTape, next_plan: Plan, samples: ir.Value, root: ir.Value, vocab_size: int) -> ir.Value:
    """[B,Q']: the new root, the drafts this pass left, and the look-ahead ids of the next plan."""
    parts = [root]
    if next_plan.drafts:
        parts.append(columns(op, samples, 1, 1 + next_plan.drafts))
    if next_plan.groups:
        ids = next_plan.lookahead_ids(vocab_size)[None]
        parts.append(per_batch(op, root, op.const(ids)))
    return parts[0] if len(parts) == 1 else op("Concat", *parts, axis=1)


def _later_drafts(
    op: GraphTape,
    plan: Plan,
    sampler: Sampler,
    logits: ir.Value,
    accepted: ir.Value,
    root: ir.Value,
    root_position: ir.Value,
    vocab_size: int,
    head: Head | None,
) -> ir.Value:
    """[B,D']: drafts from the group at the accepted depth, id V where it has no more rows."""
    rows, chosen = left_rows(op, plan, logits, accepted, vocab_size)

    # The group's first row stands where the new root will. (From `length` these positions must not be computed: its
    # memory may be overwritten by then.)
    def sample(values: ir.Value, depth: list[int]) -> ir.Value:
        return sample_rows(op, sampler, values, root_position, depth, vocab_size)

    if head is None:
        drafts = sample(chosen, list(range(plan.drafts)))
    else:

        def among(scores: ir.Value, blocks: ir.Value, j: int) -> ir.Value:
            return draw_among(op, sampler, scores, blocks, root_position, j, vocab_size)

        drafts = head_drafts(op, head, plan, sampler, chosen, rows, root, lambda row, j: sample(row, [j]), among)
    return op("Where", op("Equal", rows, op.const(0)), op.const(vocab_size), drafts)
