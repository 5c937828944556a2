"""tail.<plan>.<sampler>.onnx: sample, compare, accept, and lay out the next window. Every decision is made here.

Contract (B batch, R = Q window rows, N listed positions; only the inputs a tail reads are in its graph):

    logits         [B,R,V] float32   the trunk's, one row per window row
    input_ids      [B,Q] int64       the window that was run
    length         [B] int64         valid KV entries before the pass
    active         [B] int64         1 takes part, 0 is masked
    temperature    [B] float32       sampling tails
    noise_offsets  [B,N,2] int64     sampling tails: `pass_runtime.bundle.noise.noise_offsets` of positions 0..N-1
    top_k          [B] int64, 0 off  truncated tail
    top_p          [B] float32       truncated tail
    min_p          [B] float32       truncated tail
    draft_rows     [D+1,L'] int64    fused tails: `Plan.draft_rows`
    lookahead_ids  [A] int64         fused tails: the look-ahead ids of the window, which are the next one's too
    hidden         [B,A,H] float32   tails that draft with a head: see `tails.head`
 -> emitted        [B,E] int64       new tokens; the first `count` of them are valid
    count          [B] int64         accepted drafts and the bonus token: 1..E; 0 where masked
    next_ids       [B,Q'] int64      the next plan's window
    next_length    [B] int64         length + count
    emitted_rows   [B,E] int64       tails of trees: see `tails.tree`

A fused tail serves every choice of groups, so its Q is symbolic. A draft that no group left is id V in `next_ids`:
no sample equals it, so it is never accepted.

A masked slot emits nothing and keeps its length. Where the plan repeats (ar, fused) it keeps its window too; otherwise
its part of `next_ids` has no meaning. It is computed like the others, so the listed positions must cover it.

`next_ids` and `next_length` may share memory with `input_ids` and `length`: every reader of the inputs is an
ancestor of the node that writes the outputs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, columns, count_leading
from pass_exporter.tails.head import head_drafts
from pass_exporter.tails.tree import build_tree_tail
from pass_runtime.bundle.head import Head
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


def build_tail(plan: Plan, sampler: Sampler, vocab_size: int, head: Head | None = None) -> ir.Model:
    """The tail of `plan` by the exact-match rule. `head` makes its drafts, where it makes any."""
    if plan.parents:
        return build_tree_tail(plan, sampler, vocab_size, head)
    tail = TailBuilder(f"tail.{plan.tail}.{sampler}", plan, sampler, vocab_size, head)
    op = tail.op
    # The look-ahead rows of a fused pass are sampled once the accepted drafts decide which group counts, and a draft
    # head needs the new root.
    drafts_later = plan.is_fused or (head is not None and plan.next.drafts > 0)
    rows = plan.drafts + 1 if drafts_later else plan.width
    sampled = columns(op, tail.logits, 0, rows) if drafts_later else tail.logits
    samples = tail.sampler.sample(sampled, tail.length, plan.row_position[:rows].tolist())  # [B,rows]
    emitted = columns(op, samples, 0, plan.max_emitted)
    accepted = _accepted(tail, emitted)  # [B,1]
    count, next_length = tail.advance(accepted)
    root = op("GatherElements", emitted, accepted, axis=1)
    drafts = None
    if drafts_later:
        drafts = _later_drafts(tail, accepted, root, next_length)
    elif plan.next.drafts:
        drafts = columns(op, samples, 1, 1 + plan.next.drafts)
    return op.model(
        {
            "emitted": (emitted, np.int64, ["batch", plan.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (tail.next_window(root, drafts), np.int64, ["batch", tail.next_width]),
            "next_length": (next_length, np.int64, ["batch"]),
        }
    )


def _accepted(tail: TailBuilder, emitted: ir.Value) -> ir.Value:
    """[B,1]: how many leading drafts equal the model's own choice."""
    op, plan = tail.op, tail.plan
    if plan.drafts == 0:
        return op("Mul", columns(op, emitted, 0, 1), op.const(0))
    drafts = columns(op, tail.input_ids(), 1, 1 + plan.drafts)
    equal = op("Equal", columns(op, emitted, 0, plan.drafts), drafts)
    return count_leading(op, equal, plan.drafts)


def _later_drafts(tail: TailBuilder, accepted: ir.Value, root: ir.Value, root_position: ir.Value) -> ir.Value:
    """[B,D']: drafts from the group at the accepted depth, id V where it has no more rows.

    The group's first row stands where the new root will, at `root_position` [B]. Positions must not be computed from
    `length` here, because its memory may be overwritten by then.
    """
    op, draws = tail.op, tail.sampler
    rows, logits = tail.group_rows(accepted)
    if tail.head is None:
        drafts = draws.sample(logits, root_position, list(range(tail.plan.drafts)))
    else:
        drafts = head_drafts(
            tail,
            logits,
            rows,
            root,
            draw=lambda row, j: draws.sample(row, root_position, [j]),
            among=lambda scores, blocks, j: draws.draw_among(scores, blocks, root_position, j),
        )
    return op("Where", op("Equal", rows, op.const(0)), op.const(tail.vocab_size), drafts)
