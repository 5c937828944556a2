"""Builds tail.<plan>.<sampler>.onnx for the exact-match rule: it samples tokens, accepts the drafts
that equal them, and lays out the next window.

Contract (B batch, V vocabulary size, H hidden size, Q window rows, A look-ahead rows, D drafts,
E = `Plan.max_emitted`, N listed positions; D', Q' and L' are the next plan's drafts, width and
depth). A tail's graph has only the inputs that it reads:

    logits         [B,Q,V] float32   the trunk's logits, one row per window row
    input_ids      [B,Q] int64       the window of this pass
    length         [B] int64         valid KV entries before the pass
    active         [B] int64         1 if the slot takes part, 0 if it is masked
    temperature    [B] float32       in sampling tails
    noise_offsets  [B,N,2] int64     in sampling tails: `noise.noise_offsets` of positions 0..N-1
    top_k          [B] int64         in truncated tails; 0: off
    top_p          [B] float32       in truncated tails; 1: off
    min_p          [B] float32       in truncated tails; 0: off
    draft_rows     [D+1,L'] int64    in fused tails: `Plan.draft_rows`
    lookahead_ids  [A] int64         in fused tails: the look-ahead ids of this and the next window
    hidden         [B,A,H] float32   in tails that draft with a head: see `tails.head`
 -> emitted        [B,E] int64       new tokens; the first `count` of them are valid
    count          [B] int64         accepted drafts plus the bonus token: 1..E; 0 if masked
    next_ids       [B,Q'] int64      the next plan's window
    next_length    [B] int64         length + count
    emitted_rows   [B,E] int64       from tails of trees: see `tails.tree`

A fused tail serves windows with any number of look-ahead rows, so its Q is symbolic. If there is no
look-ahead row for a draft, the draft's id in `next_ids` is V: no sample equals V, so the draft is
never accepted.

A masked slot emits nothing and keeps its length. If the next pass has the same plan (ar, fused),
the slot keeps its window too; otherwise its row of `next_ids` has no meaning. The tail computes a
masked slot like the others, so `noise_offsets` must list the slot's positions too.

`next_ids` and `next_length` may share memory with `input_ids` and `length`: all nodes that read
these inputs come before the node that writes the output.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, count_leading, slice_rows
from pass_exporter.tails.head import CandidateSubset, Choices, Choose, head_drafts
from pass_exporter.tails.tree import build_tree_tail
from pass_exporter.tails.window_noise import ChainNoise, WindowNoise
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


def build_tail(
    plan: Plan, sampler: Sampler, vocab_size: int, head: HeadArrays | None = None
) -> ir.Model:
    """Build the tail of `plan` for the exact-match rule. head: makes the drafts, or None."""
    if plan.parents:
        return build_tree_tail(plan, sampler, vocab_size, head)
    tail = TailBuilder(f"tail.{plan.tail}.{sampler}", plan, sampler, vocab_size, head)
    op = tail.op
    # In a fused pass the number of accepted drafts says which look-ahead rows make the next drafts,
    # and a draft head reads the new root. Then the next drafts are drawn after the new root.
    drafts_later = plan.is_fused or (head is not None and plan.next.drafts > 0)
    rows = plan.drafts + 1 if drafts_later else plan.width
    logits = slice_rows(op, tail.logits, 0, rows) if drafts_later else tail.logits
    window = None
    if sampler == "greedy":
        samples = op("ArgMax", logits, axis=-1, keepdims=0)  # [B,rows]
    else:
        # If all drafts are accepted, the next drafts come after the positions of all `rows`.
        positions = rows + plan.next.drafts if drafts_later else rows
        window = WindowNoise.after(tail, tail.length, positions, "noise_offsets")
        samples = window.sample(logits, plan.row_position[:rows].tolist())
    emitted = samples if rows == plan.max_emitted else slice_rows(op, samples, 0, plan.max_emitted)
    accepted = _accepted(tail, emitted)  # [B,1]
    count, next_length = tail.advance(accepted)
    root = op("GatherElements", emitted, accepted, axis=1) if plan.drafts else emitted
    drafts = None
    if drafts_later:
        drafts = _later_drafts(tail, accepted, root, window)
    elif plan.next.drafts:
        drafts = slice_rows(op, samples, 1, 1 + plan.next.drafts)
    return op.model(
        {
            "emitted": (emitted, np.int64, ["batch", plan.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (tail.next_window(root, drafts), np.int64, ["batch", tail.next_width]),
            "next_length": (next_length, np.int64, ["batch"]),
        }
    )


def _accepted(tail: TailBuilder, emitted: ir.Value) -> ir.Value:
    """Return the number [B,1] of leading drafts that equal the model's own tokens, `emitted`."""
    op, plan = tail.op, tail.plan
    if plan.drafts == 0:
        return op("Mul", emitted, op.const(0))
    drafts = slice_rows(op, tail.input_ids(), 1, 1 + plan.drafts)
    equal = op("Equal", slice_rows(op, emitted, 0, plan.drafts), drafts)
    return count_leading(op, equal, plan.drafts)


def _later_drafts(
    tail: TailBuilder, accepted: ir.Value, root: ir.Value, window: WindowNoise | None
) -> ir.Value:
    """Return the drafts [B,D'] by the look-ahead rows after the last accepted draft, or V."""
    op, sampler, count = tail.op, tail.sampler, tail.plan.next.drafts
    rows, logits = tail.group_rows(accepted)
    chain = None if window is None else ChainNoise(window, accepted, count)
    if tail.head is not None:
        drafts = head_drafts(tail, logits, rows, root, _choice(tail, chain))
    elif chain is None:
        drafts = op("ArgMax", logits, axis=-1, keepdims=0)
    else:
        drafts = sampler.draw(sampler.weights(logits, count), chain.of_all_blocks(), count)
    return op("Where", op("Equal", rows, op.const(0)), op.const(tail.vocab_size), drafts)


def _choice(tail: TailBuilder, chain: ChainNoise | None) -> Choose:
    """Return the function that chooses drafts for a draft head. chain: noise; None if greedy."""
    op, sampler = tail.op, tail.sampler

    def choose(choices: Choices, scores: ir.Value, j: int) -> ir.Value:
        if chain is None:
            return choices.best(j, scores)
        if isinstance(choices, CandidateSubset):
            return choices.token_ids(
                j, sampler.draw_candidate(scores, chain.of_candidates(choices.blocks)[j])
            )
        return op(
            "Unsqueeze", sampler.draw(sampler.weights(scores, 1), chain.of_row(j), 1), op.const([2])
        )

    return choose
