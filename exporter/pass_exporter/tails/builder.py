"""Builds what the tails of both acceptance rules share: inputs, picked rows, the next window.

The letters in shapes are those of `tails.match`.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.sampler import SamplerNodes
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


class TailBuilder:
    """Builds the tail that follows a pass of `plan` and lays out the window of `plan.next`.

    op: records the nodes. sampler: adds the nodes that draw tokens. head: the draft head, or None.
    width, next_width: Q and Q', the numbers of rows of the two windows. In a fused tail both are
    the same symbolic size, because the tail serves windows with any number of look-ahead rows.
    """

    def __init__(
        self, name: str, plan: Plan, sampler: Sampler, vocab_size: int, head: HeadArrays | None
    ) -> None:
        self.op, self.plan, self.vocab_size, self.head = GraphTape(name), plan, vocab_size, head
        self.sampler = SamplerNodes(self.op, sampler, vocab_size)
        self.width: int | str = "width" if plan.is_fused else plan.width
        self.next_width: int | str = "width" if plan.is_fused else plan.next.width
        self.logits = self.op.input("logits", np.float32, ["batch", self.width, vocab_size])
        self.length = self.op.input("length", np.int64, ["batch"])

    def input_ids(self) -> ir.Value:
        """Return the input [B,Q] int64 with the window of this pass."""
        return self.op.input("input_ids", np.int64, ["batch", self.width])

    def draft_probs(self) -> ir.Value:
        """Return the input [B,D,V] float32 with the distribution that each draft was drawn from."""
        return self.op.input(
            "draft_probs", np.float32, ["batch", self.plan.drafts, self.vocab_size]
        )

    def advance(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return `count` and `next_length`, [B] each, after `accepted` [B,1] drafts.

        A masked slot emits nothing: its count is 0.
        """
        op, active = self.op, self.op.input("active", np.int64, ["batch"])
        count = op("Squeeze", accepted, op.const([1]))
        if self.plan.drafts:
            count = op("Mul", op("Add", count, op.const(1)), active)
        else:  # `accepted` is 0
            count = op("Add", count, active)
        return count, op("Add", self.length, count)

    def group_rows(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the rows [B,L'] that make the next drafts, and their logits [B,L',V].

        A row is 0 if no look-ahead row makes the draft. accepted [B,1]: the number of accepted
        drafts; in a tree, the row of the last accepted draft.
        """
        op, plan = self.op, self.plan
        if plan.is_fused:
            table = op.input("draft_rows", np.int64, [plan.drafts + 1, plan.next.depth])
            width = op("Add", self.lookahead_count(), op.const(1 + plan.drafts))
        else:
            table, width = op.const(plan.draft_rows), op.const([plan.width])
        rows = op("Gather", table, op("Squeeze", accepted, op.const([1])), axis=0)
        return rows, self.pick_rows(self.logits, rows, width, self.vocab_size)

    def pick_rows(
        self, values: ir.Value, rows: ir.Value, height: ir.Value | int, size: int
    ) -> ir.Value:
        """Return [B,K,size]: for each slot, its `rows` [B,K] of values [B,height,size].

        height: a number, or a tensor [1]. GatherND would do this in one node, but cannot be
        captured as a CUDA graph.
        """
        op = self.op
        ones = op("Max", op.input("active", np.int64, ["batch"]), op.const(1))
        # [B,1]: 0 .. B-1, from a sum of ones for the reason that `lookahead_count` gives
        slots = op("Unsqueeze", op("CumSum", ones, op.const(0), exclusive=1), op.const([1]))
        first_row = op("Mul", slots, op.const(height) if isinstance(height, int) else height)
        flat = op("Reshape", values, op.const([-1, size]))
        return op("Gather", flat, op("Add", rows, first_row), axis=0)

    def lookahead_count(self) -> ir.Value:
        """Return A [1] int64, the number of look-ahead rows of a fused window.

        A is computed as a sum of ones: as a part of a shape it would be on the host, and a tail
        that multiplies it with tensors on the device cannot be captured as a CUDA graph.
        """
        op = self.op
        # Look-ahead ids are at least the vocabulary size, so the minimum is 1.
        ones = op("Min", op.input("lookahead_ids", np.int64, ["lookahead_rows"]), op.const(1))
        return op("ReduceSum", ones, op.const([0]), keepdims=1)

    def lookahead_ids(self, root: ir.Value) -> ir.Value:
        """Return the ids [B,A] of the next window's look-ahead rows. root [B,1] only gives B."""
        op = self.op
        if self.plan.is_fused:
            ids = op.input("lookahead_ids", np.int64, ["lookahead_rows"])
        else:
            ids = op.const(self.plan.next.lookahead_ids(self.vocab_size))
        return op("Add", op("Mul", root, op.const(0)), ids)

    def next_window(self, root: ir.Value, drafts: ir.Value | None) -> ir.Value:
        """Return the next window [B,Q']: root [B,1], drafts [B,D'], and the look-ahead ids.

        If the next pass has the same plan, a masked slot keeps the window of this pass.
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
        """Return whether each slot takes part in the pass: bool [B], with `axes` inserted."""
        active = self.op.input("active", np.int64, ["batch"])
        return self.op(
            "Unsqueeze", self.op("Greater", active, self.op.const(0)), self.op.const(axes)
        )


def slice_rows(op: GraphTape, value: ir.Value, start: int, stop: int) -> ir.Value:
    """Return value[:, start:stop]."""
    return op("Slice", value, op.const([start]), op.const([stop]), op.const([1]))


def count_leading(op: GraphTape, values: ir.Value, count: int) -> ir.Value:
    """Return how many of values [B,count] bool are true before the first false one: [B,1]."""
    false_indices = op("Where", values, op.const(count), op.const(np.arange(count)[None]))
    return op("ReduceMin", false_indices, op.const([1]), keepdims=1)


def run_after(op: GraphTape, value: ir.Value, first: ir.Value) -> ir.Value:
    """Return `value` from a node that runs after the nodes that compute `first`; both are integers.

    An output may be written over the memory of an input, so nodes that read this input must run
    first. ONNX cannot order nodes without data between them, so this adds `first` times zero.
    """
    return op("Add", value, op("Mul", first, op.const(0)))
