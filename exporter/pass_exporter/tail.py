"""tail.<plan>.<sampler>.onnx: sample, compare, accept, and lay out the next window. Every decision is made here.

Contract (B batch, R = Q window rows, N listed positions; only the inputs a tail reads are in its graph):

    logits         [B,R,V] float32   the trunk's, one row per window row
    input_ids      [B,Q] int64       the window that was run
    length         [B] int64         valid KV entries before the pass
    temperature    [B] float32       sampling tails
    noise_offsets  [B,N,2] int64     sampling tails: `pass_runtime.noise.noise_offsets` of positions 0..N-1
    top_k          [B] int64, 0 off  truncated tail
    top_p          [B] float32       truncated tail
 -> emitted        [B,E] int64       new tokens; the first `count` of them are valid
    count          [B] int64         accepted drafts and the bonus token: 1..E
    next_ids       [B,Q'] int64      the next plan's window
    next_length    [B] int64         length + count

`next_ids` and `next_length` may share memory with `input_ids` and `length`: every reader of the inputs is an
ancestor of the node that writes the outputs.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.sampler_graph import sample_rows
from pass_exporter.tape import GraphTape
from pass_runtime.plan import Plan
from pass_runtime.sampling import Sampler


def build_tail(plan: Plan, next_plan: Plan, sampler: Sampler, vocab_size: int) -> ir.Model:
    """The tail of `plan`, preparing the window of `next_plan`."""
    op = GraphTape(f"tail.{plan.name}.{sampler}")
    logits = op.input("logits", np.float32, ["batch", plan.width, vocab_size])
    length = op.input("length", np.int64, ["batch"])
    samples = sample_rows(op, sampler, logits, plan.row_position.tolist(), vocab_size)  # [B,R]
    emitted = _columns(op, samples, 0, plan.max_emitted)
    accepted = _accepted(op, plan, emitted)  # [B,1]
    count = op("Add", op("Squeeze", accepted, op.const([1])), op.const(1))
    root = op("GatherElements", emitted, accepted, axis=1)
    next_ids = _next_window(op, plan, next_plan, samples, root, vocab_size)
    return op.model(
        {
            "emitted": (emitted, np.int64, ["batch", plan.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (next_ids, np.int64, ["batch", next_plan.width]),
            "next_length": (op("Add", length, count), np.int64, ["batch"]),
        }
    )


def _accepted(op: GraphTape, plan: Plan, emitted: ir.Value) -> ir.Value:
    """[B,1]: how many leading drafts equal the model's own choice (the `match` rule)."""
    if plan.drafts == 0:
        return op("Mul", _columns(op, emitted, 0, 1), op.const(0))
    input_ids = op.input("input_ids", np.int64, ["batch", plan.width])
    drafts = _columns(op, input_ids, 1, 1 + plan.drafts)
    equal = op("Equal", _columns(op, emitted, 0, plan.drafts), drafts)
    index = op.const(np.arange(plan.drafts)[None])
    first_miss = op("Where", equal, op.const(plan.drafts), index)
    return op("ReduceMin", first_miss, op.const([1]), keepdims=1)


def _next_window(
    op: GraphTape, plan: Plan, next_plan: Plan, samples: ir.Value, root: ir.Value, vocab_size: int
) -> ir.Value:
    """[B,Q']: the new root, the drafts this pass left, and the look-ahead ids of the next plan."""
    parts = [root]
    if next_plan.drafts:
        assert plan.groups == (next_plan.drafts,), f"{plan.name} leaves no drafts for {next_plan.name}"
        parts.append(_columns(op, samples, 1, 1 + next_plan.drafts))
    if next_plan.groups:
        ids = next_plan.lookahead_ids(vocab_size)[None]
        parts.append(op("Add", op("Mul", root, op.const(0)), op.const(ids)))  # broadcast over the batch
    return parts[0] if len(parts) == 1 else op("Concat", *parts, axis=1)


def _columns(op: GraphTape, value: ir.Value, start: int, stop: int) -> ir.Value:
    """value[:, start:stop]"""
    return op("Slice", value, op.const([start]), op.const([stop]), op.const([1]))
