"""What tails of both rules share. docs/bundle.md explains the letters in shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.noise import RowNoise
from pass_exporter.tails.sampler import SamplerNodes
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.sampling import Sampler
from pass_runtime.bundle.window import Window


class TailBuilder:
    """width, next_width: one symbolic size in a fused tail, for any number of look-ahead rows."""

    def __init__(
        self, name: str, window: Window, sampler: Sampler, vocab_size: int, head: HeadArrays | None
    ) -> None:
        self.op, self.window, self.vocab_size, self.head = GraphTape(name), window, vocab_size, head
        self.sampler = SamplerNodes(self.op, sampler, vocab_size)
        self.width: int | str = "width" if window.is_fused else window.width
        self.next_width: int | str = "width" if window.is_fused else window.next.width
        self.logits = self.op.input("logits", np.float32, ["batch", self.width, vocab_size])
        self.length = self.op.input("length", np.int64, ["batch"])

    def input_ids(self) -> ir.Value:
        return self.op.input("input_ids", np.int64, ["batch", self.width])

    def draft_probs(self) -> ir.Value:
        return self.op.input(
            "draft_probs", np.float32, ["batch", self.window.drafts, self.vocab_size]
        )

    def advance(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return `count` and `next_length` [B] after `accepted` [B,1] drafts."""
        op, active = self.op, self.op.input("active", np.int64, ["batch"])
        count = op("Squeeze", accepted, op.const([1]))
        if self.window.drafts:
            count = op("Mul", op("Add", count, op.const(1)), active)
        else:  # `accepted` is 0
            count = op("Add", count, active)
        return count, op("Add", self.length, count)

    def group_rows(self, accepted: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the rows [B,L'] that make the next drafts, 0 for none, and their logits
        [B,L',V]."""
        op, window = self.op, self.window
        if window.is_fused:
            table = op.input("draft_rows", np.int64, [window.drafts + 1, window.next.drafts])
            width = op("Add", self.lookahead_count(), op.const(1 + window.drafts))
        else:
            table, width = op.const(window.draft_rows), op.const([window.width])
        rows = op("Gather", table, op("Squeeze", accepted, op.const([1])), axis=0)
        return rows, self.pick_rows(self.logits, rows, width, self.vocab_size)

    def pick_rows(
        self, values: ir.Value, rows: ir.Value, height: ir.Value | int, size: int
    ) -> ir.Value:
        """rows [B,K] of values [B,height,size] -> [B,K,size]. A CUDA graph cannot contain
        GatherND."""
        op = self.op
        ones = op("Max", op.input("active", np.int64, ["batch"]), op.const(1))
        # [B,1]: 0 .. B-1, for the reason that `lookahead_count` gives
        slots = op("Unsqueeze", op("CumSum", ones, op.const(0), exclusive=1), op.const([1]))
        first_row = op("Mul", slots, op.const(height) if isinstance(height, int) else height)
        flat = op("Reshape", values, op.const([-1, size]))
        return op("Gather", flat, op("Add", rows, first_row), axis=0)

    def lookahead_count(self) -> ir.Value:
        """Return A [1] int64 as a sum of ones: a CUDA graph cannot contain the product of a
        shape, which is on the host, with tensors on the device."""
        op = self.op
        # Look-ahead ids are at least the vocabulary size.
        ones = op("Min", op.input("lookahead_ids", np.int64, ["lookahead_rows"]), op.const(1))
        return op("ReduceSum", ones, op.const([0]), keepdims=1)

    def lookahead_ids(self, root: ir.Value) -> ir.Value:
        """Return [B,A]. root [B,1] only gives B."""
        op = self.op
        if self.window.is_fused:
            ids = op.input("lookahead_ids", np.int64, ["lookahead_rows"])
        else:
            ids = op.const(self.window.next.lookahead_ids(self.vocab_size))
        return op("Add", op("Mul", root, op.const(0)), ids)

    def next_window(self, root: ir.Value, drafts: ir.Value | None) -> ir.Value:
        """Return [B,Q']. A masked slot keeps its window if the layout stays."""
        parts = [root]
        if drafts is not None:
            parts.append(drafts)
        if self.window.next.groups:
            parts.append(self.lookahead_ids(root))
        window = root if len(parts) == 1 else self.op("Concat", *parts, axis=1)
        if self.window.next != self.window:
            return window
        return self.op("Where", self.is_active([1]), window, self.input_ids())

    def is_active(self, axes: list[int]) -> ir.Value:
        """bool [B], with `axes` inserted."""
        active = self.op.input("active", np.int64, ["batch"])
        return self.op(
            "Unsqueeze", self.op("Greater", active, self.op.const(0)), self.op.const(axes)
        )


def slice_rows(op: GraphTape, value: ir.Value, start: int, stop: int) -> ir.Value:
    return op("Slice", value, op.const([start]), op.const([stop]), op.const([1]))


def count_leading(op: GraphTape, values: ir.Value, count: int) -> ir.Value:
    """Count the leading true ones of values [B,count]: [B,1]."""
    false_indices = op("Where", values, op.const(count), op.const(np.arange(count)[None]))
    return op("ReduceMin", false_indices, op.const([1]), keepdims=1)


def run_after(op: GraphTape, value: ir.Value, first: ir.Value) -> ir.Value:
    """Compute `value` after `first`: an output may overwrite an input that these read."""
    return op("Add", value, op("Mul", first, op.const(0)))


@dataclass(frozen=True)
class WindowNoise:
    """[B,P,I] for P = `count` positions. A *place* is an index there."""

    tail: TailBuilder
    numbers: ir.Value
    count: int

    @staticmethod
    def after(tail: TailBuilder, before: ir.Value, count: int, stream: str) -> WindowNoise:
        return WindowNoise(tail, tail.sampler.noise.at(before, count, stream), count)

    def at(self, places: list[int]) -> RowNoise:
        """Of rows that draw for these places."""
        numbers = self.numbers
        if places != list(range(self.count)):
            numbers = self.tail.op("Gather", numbers, self.tail.op.const(places), axis=1)
        return self.tail.sampler.noise.of_all_blocks(numbers)

    def sample(self, logits: ir.Value, places: list[int]) -> ir.Value:
        """logits [B,R,V] -> tokens [B,R] int64."""
        sampler = self.tail.sampler
        return sampler.draw(sampler.weights(logits, len(places)), self.at(places), len(places))


@dataclass(frozen=True)
class ChainNoise:
    """For drafts at the `count` places after place `before` [B,1]."""

    window: WindowNoise
    before: ir.Value
    count: int

    def of_all_blocks(self) -> RowNoise:
        tail, noise = self.window.tail, self.window.tail.sampler.noise
        places = tail.op("Add", self.before, tail.op.const(1 + np.arange(self.count)[None]))
        return noise.of_all_blocks(
            tail.pick_rows(self.window.numbers, places, self.window.count, noise.entries)
        )

    def of_row(self, j: int) -> RowNoise:
        rows, split, sizes = self.of_all_blocks(), self.window.tail.op.split, [1] * self.count
        return RowNoise(split(rows.blocks, sizes, axis=1)[j], split(rows.tokens, sizes, axis=1)[j])

    def of_candidates(self, blocks: ir.Value) -> list[RowNoise]:
        """Of drafts that draw from `blocks` [B,count,K] alone."""
        noise = self.window.tail.sampler.noise
        return noise.of_candidates(
            self.window.numbers, self.window.count, self.before, blocks, self.count
        )
