"""Rows of windows, as the tails of both rules and the draft head pick them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.plan import Plan


def left_rows(
    op: GraphTape, plan: Plan, logits: ir.Value, accepted: ir.Value, vocab_size: int
) -> tuple[ir.Value, ir.Value]:
    """The rows that draft the next window where `accepted` [B,1] drafts are: [B,D'], 0 for none; and their logits."""
    if plan.is_fused:
        table = op.input("draft_rows", np.int64, [plan.drafts + 1, plan.next.drafts])
        width = op("Shape", logits, start=1, end=2)
    else:
        table, width = op.const(plan.draft_rows), op.const([plan.width])
    rows = op("Gather", table, op("Squeeze", accepted, op.const([1])), axis=0)
    return rows, pick_rows(op, logits, rows, width, vocab_size)


def pick_rows(op: GraphTape, values: ir.Value, rows: ir.Value, height: ir.Value | int, vocab_size: int) -> ir.Value:
    """values [B,height,V], rows [B,K] -> [B,K,V]. (GatherND would keep the tail out of CUDA graphs.)"""
    height = op.const(height) if isinstance(height, int) else height
    ones = op("Add", op("Mul", columns(op, rows, 0, 1), op.const(0)), op.const(1))  # [B,1]
    first = op("Mul", op("CumSum", ones, op.const(0), exclusive=1), height)  # [B,1]: b * height
    flat = op("Reshape", values, op.const([-1, vocab_size]))
    return op("Gather", flat, op("Add", rows, first), axis=0)


def columns(op: GraphTape, value: ir.Value, start: int, stop: int) -> ir.Value:
    """value[:, start:stop]"""
    return op("Slice", value, op.const([start]), op.const([stop]), op.const([1]))


def leading(op: GraphTape, good: ir.Value, count: int) -> ir.Value:
    """[B,count] bool -> [B,1]: how many are true before the first that is not."""
    first_miss = op("Where", good, op.const(count), op.const(np.arange(count)[None]))
    return op("ReduceMin", first_miss, op.const([1]), keepdims=1)


def fused_rows(op: GraphTape) -> ir.Value:
    """[1,A]: the look-ahead ids of a fused window."""
    return op("Unsqueeze", op.input("lookahead_ids", np.int64, ["lookahead_rows"]), op.const([0]))


def per_batch(op: GraphTape, root: ir.Value, ids: ir.Value) -> ir.Value:
    """[1,A] -> [B,A]"""
    return op("Add", op("Mul", root, op.const(0)), ids)
