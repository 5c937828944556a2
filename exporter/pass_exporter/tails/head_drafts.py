"""The draft head (`model.draft_head`) as ONNX operators. m and r: width and rank of
`HeadArrays`, C: candidate tokens; other letters as in docs/bundle.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS, HEAD_PREFIX, HeadArrays, has_candidate_subset

F32 = np.float32


def head_drafts(
    tail: TailBuilder, logits: ir.Value, rows: ir.Value, root: ir.Value, choose: Choose
) -> ir.Value:
    """Return the drafts [B,D] by look-ahead `rows` [B,D] with logits [B,D,V], and the new root
    [B,1]. A row of 0 makes no draft."""
    op, head, count = tail.op, tail.head, tail.window.next.drafts
    assert head is not None
    choices = _choices(tail, head, logits, count)
    # What no earlier draft changes is computed for all at once.
    projected = op("Unsqueeze", _projected_rows(tail, head, rows), op.const([2]))
    projected_by_row = op.split(projected, [1] * count, axis=1)  # [B,1,1,m] each
    drafts: list[ir.Value] = []
    token, state = op("Unsqueeze", root, op.const([2])), None  # [B,1,1]; later states [B,1,1,m]
    for j in range(count):
        by_token = op("MatMul", _table_rows(op, head, token), _array(op, head, "token"))
        x = op("Add", projected_by_row[j], by_token)
        if state is not None:
            x = op("Add", x, op("MatMul", state, _array(op, head, "state")))
        state = op("Mul", x, op("Sigmoid", x))
        scores = choices.scores(j, op("MatMul", state, _array(op, head, "out")))  # [B,1,C]
        token = choose(choices, scores, j)
        drafts.append(token)
    return op("Squeeze", op("Concat", *drafts, axis=1), op.const([2]))


@dataclass(frozen=True)
class CandidateSubset:
    """C candidates of each of D rows, in blocks [B,D,C/8]. By row: ids, logits [B,1,C] (the
    first tokens of all blocks, then the second ones ...), and rows of the table [B,1,C,r]."""

    op: GraphTape
    blocks: ir.Value
    ids: Sequence[ir.Value]
    logits: Sequence[ir.Value]
    vectors: Sequence[ir.Value]

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        """Return logits [B,1,C]. direction [B,1,1,r]: state @ out."""
        op, count = self.op, noise.BLOCK_SIZE * CANDIDATE_BLOCKS
        # [B,1,C,1]
        products = op("MatMul", self.vectors[j], op("Reshape", direction, op.const([0, 1, -1, 1])))
        return op("Add", self.logits[j], op("Reshape", products, op.const([-1, 1, count])))

    def best(self, j: int, scores: ir.Value) -> ir.Value:
        return self.token_ids(j, self.op("ArgMax", scores, axis=2, keepdims=1))

    def token_ids(self, j: int, index: ir.Value) -> ir.Value:
        return self.op("GatherElements", self.ids[j], index, axis=2)

    def vocabulary_logits(self, j: int, scores: ir.Value, vocab_size: int) -> ir.Value:
        """scores [B,1,C] -> logits [B,1,V], -inf elsewhere."""
        op = self.op
        batch = op("Shape", scores, start=0, end=1)
        excluded = op(
            "Expand", op.const(-np.inf, F32), op("Concat", batch, op.const([1, vocab_size]), axis=0)
        )
        return op("ScatterElements", excluded, self.ids[j], scores, axis=2)


@dataclass(frozen=True)
class FullVocabulary:
    """All tokens are candidates. logits: [B,1,V] by row. vectors: [V,r]."""

    op: GraphTape
    logits: Sequence[ir.Value]
    vectors: ir.Value

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        op = self.op
        products = op("Gemm", op("Squeeze", direction, op.const([1, 2])), self.vectors, transB=1)
        return op("Add", self.logits[j], op("Unsqueeze", products, op.const([1])))

    def best(self, _j: int, scores: ir.Value) -> ir.Value:
        return self.op("ArgMax", scores, axis=2, keepdims=1)

    def vocabulary_logits(self, _j: int, scores: ir.Value, _vocab_size: int) -> ir.Value:
        return scores


Choices = CandidateSubset | FullVocabulary
Choose = Callable[[Choices, ir.Value, int], ir.Value]
"""(choices, scores [B,1,C] of a row, its index) -> the drafted id [B,1,1]."""


def _choices(tail: TailBuilder, head: HeadArrays, logits: ir.Value, count: int) -> Choices:
    op, vocab_size, size = tail.op, len(head.table), noise.BLOCK_SIZE

    def by_row(values: ir.Value) -> Sequence[ir.Value]:
        return op.split(values, [1] * count, axis=1)

    if not has_candidate_subset(vocab_size):
        # With constant indices ONNX Runtime would fold Gather and Cast, and keep a float32 copy of
        # the table.
        any_active = op("ReduceMax", op.input("active", np.int64, ["batch"]), op.const([0]))
        zero = op("Mul", any_active, op.const(0))
        rows = by_row(logits)
        ids = op("Add", op.const(np.arange(vocab_size)), zero)
        return FullVocabulary(op, rows, _table_rows(op, head, ids))
    blocks = noise.vocabulary_blocks(vocab_size)
    by_block = op("Reshape", logits, op.const([-1, count, size, blocks]))
    maxima = op("ReduceMax", by_block, op.const([2]), keepdims=0)
    _, chosen = op.pair("TopK", maxima, op.const([CANDIDATE_BLOCKS]), axis=-1, sorted=0)
    ids = op(
        "Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * np.arange(size)[:, None])
    )
    ids = op("Reshape", ids, op.const([-1, count, size * CANDIDATE_BLOCKS]))
    candidate_logits = op("GatherElements", logits, ids, axis=2)
    return CandidateSubset(
        op, chosen, by_row(ids), by_row(candidate_logits), by_row(_table_rows(op, head, ids))
    )


def _projected_rows(tail: TailBuilder, head: HeadArrays, rows: ir.Value) -> ir.Value:
    """[B,D,m] of the head's states."""
    op, window, size, count = tail.op, tail.window, len(head.hidden), sum(tail.window.groups)
    row_count = "lookahead_rows" if window.is_fused else count
    hidden = op.input("hidden", F32, ["batch", row_count, size])
    if window.is_fused:
        lookahead_index = op("Max", op("Sub", rows, op.const(1 + window.drafts)), op.const(0))
        hidden = tail.pick_rows(hidden, lookahead_index, tail.lookahead_count(), size)
    projected = op("MatMul", hidden, _array(op, head, "hidden"))
    return op("Add", projected, _array(op, head, "bias"))


def _table_rows(op: GraphTape, head: HeadArrays, ids: ir.Value) -> ir.Value:
    """Cast after the Gather, so that no engine keeps a cast table."""
    stored = op("Gather", op.const(head.table, np.float16, f"{HEAD_PREFIX}table"), ids, axis=0)
    return op("Cast", stored, to=int(ir.DataType.FLOAT))


def _array(op: GraphTape, head: HeadArrays, name: str) -> ir.Value:
    return op.const(getattr(head, name), F32, f"{HEAD_PREFIX}{name}")
