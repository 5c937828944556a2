"""What the tails of both acceptance rules have in common: inputs, rows of the window, and the next window."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.sampler import SamplerNodes
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.head import Head
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


class TailBuilder:
    """The graph of one tail while it is built: `plan` is run, and the window of `plan.next` is laid out.

    op: records the nodes. sampler: adds the nodes that draw tokens. width: Q, the rows of the window; symbolic in a
    fused tail, which serves every choice of groups. head: the draft head, or None.
    """

    def __init__(self, name: str, plan: Plan, sampler: Sampler, vocab_size: int, head: Head | None) -> None:
        self.op, self.plan, self.vocab_size, self.head = GraphTape(name), plan, vocab_size, head
        self.sampler = SamplerNodes(self.op, sampler, vocab_size)
        self.width: int | str = "width" if plan.is_fused else plan.width
        self.next_width: int | str = "width" if plan.is_fused else plan.next.width
        self.logits = self.op.input("logits", np.float32, ["batch", self.width, vocab_size])
        self.length = self.op.input("length", np.int64, ["batch"])

    def input_ids(self) -> ir.Value:
        """[B,Q] int64: the window that was run."""
        return self.op.input("input_ids", np.int64, ["batch", self.width])

    def draft_probs(self) -> ir.Value:
        """[B,D,V] float32, of the rejection rule: the distributions that the window's drafts were drawn from."""
        return self.op.input("draft_probs", np.float32, ["batch", self.plan.drafts, self.vocab_size])

    def advance(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """accepted [B,1] -> `count` and `next_length`, [B] each: a masked slot emits nothing and keeps its length."""
        count = self.op("Add", self.op("Squeeze", accepted, self.op.const([1])), self.op.const(1))
        count = self.op("Mul", count, self.op.input("active", np.int64, ["batch"]))
        return count, self.op("Add", self.length, count)

    def group_rows(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Which rows draft the next window: [B,L'], 0 for none; and their logits. accepted [B,1]: how many drafts were,
        or of a tree the row of the last one."""
        op, plan = self.op, self.plan
        if plan.is_fused:
            table = op.input("draft_rows", np.int64, [plan.drafts + 1, plan.next.depth])
            width = op("Add", self.lookahead_count(), op.const(1 + plan.drafts))
        else:
            table, width = op.const(plan.draft_rows), op.const([plan.width])
        rows = op("Gather", table, op("Squeeze", accepted, op.const([1])), axis=0)
        return rows, pick_rows(op, self.logits, rows, width, self.vocab_size)

    def lookahead_count(self) -> ir.Value:
        """[1] int64, of a fused tail: A. It is counted, and not taken from a shape, because sizes are on the host: a
        tail that multiplies one with tensors of the device cannot be captured as a CUDA graph."""
        op = self.op
        ones = op("Add", op("Mul", op.input("lookahead_ids", np.int64, ["lookahead_rows"]), op.const(0)), op.const(1))
        return op("ReduceSum", ones, op.const([0]), keepdims=1)

    def lookahead_ids(self, root: ir.Value) -> ir.Value:
        """[B,A]: the ids in the look-ahead rows of the next window. root [B,1] gives the batch size."""
        op = self.op
        if self.plan.is_fused:
            ids = op("Unsqueeze", op.input("lookahead_ids", np.int64, ["lookahead_rows"]), op.const([0]))
        else:
            ids = op.const(self.plan.next.lookahead_ids(self.vocab_size)[None])
        return op("Add", op("Mul", root, op.const(0)), ids)

    def next_window(self, root: ir.Value, drafts: ir.Value | None) -> ir.Value:
        """[B,Q']: the new root [B,1], the drafts [B,D'] that this pass left, and the look-ahead ids.

        A masked slot keeps the window that was run, where the next pass has the same plan.
        """
        parts = [root]
        if drafts is not None:
            parts.append(drafts)
        if self.plan.next.groups:
            parts.append(self.lookahead_ids(root))
        window = root if len(parts) == 1 else self.op("Concat", *parts, axis=1)
        if self.plan.next != self.plan:
            return window
        return self.op("Where", self.is_active([1]), window, self.input_ids())

    def is_active(self, axes: list[int]) -> ir.Value:
        """[B,1,...] bool, with new `axes`: whether the slot takes part in the pass."""
        active = self.op.input("active", np.int64, ["batch"])
        return self.op("Unsqueeze", self.op("Greater", active, self.op.const(0)), self.op.const(axes))


def pick_rows(op: GraphTape, values: ir.Value, rows: ir.Value, height: ir.Value | int, size: int) -> ir.Value:
    """values [B,height,size], rows [B,K] -> [B,K,size]. height: a number, or [1] on the device. (A GatherND would keep
    the tail out of CUDA graphs.)"""
    height = op.const(height) if isinstance(height, int) else height
    ones = op("Add", op("Mul", columns(op, rows, 0, 1), op.const(0)), op.const(1))  # [B,1]
    first = op("Mul", op("CumSum", ones, op.const(0), exclusive=1), height)  # [B,1]: b * height
    flat = op("Reshape", values, op.const([-1, size]))
    return op("Gather", flat, op("Add", rows, first), axis=0)


def columns(op: GraphTape, value: ir.Value, start: int, stop: int) -> ir.Value:
    """value[:, start:stop]"""
    return op("Slice", value, op.const([start]), op.const([stop]), op.const([1]))


def count_leading(op: GraphTape, good: ir.Value, count: int) -> ir.Value:
    """[B,count] bool -> [B,1]: how many are true before the first that is not."""
    first_miss = op("Where", good, op.const(count), op.const(np.arange(count)[None]))
    return op("ReduceMin", first_miss, op.const([1]), keepdims=1)


def ordered_after(op: GraphTape, value: ir.Value, first: ir.Value) -> ir.Value:
    """`value`, from a node that runs after whatever computes `first`: both are integers of one shape.

    ONNX has no edge that only says in which order nodes run, and an output may share its memory with an input. Adding
    zero times `first` makes every reader of that input run before the output is written.
    """
    return op("Add", value, op("Mul", first, op.const(0)))
