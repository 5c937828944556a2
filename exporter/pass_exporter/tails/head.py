"""The draft head of `pass_exporter.tails.definitions` as ONNX operators, for tails that draft for the next window.

A tail with a head has one more input:

    hidden         [B,A,H] float32   the trunk's, one row per look-ahead row

The terms without recurrence are computed once for all drafts; the recurrence over drafts is unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, pick_rows
from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS, HEAD_PREFIX, HeadArrays, has_candidate_subset

F32 = np.float32
Draw = Callable[[ir.Value, int], ir.Value]
"""(a row's logits [B,1,V], the row's index) -> [B,1], a token id."""
DrawCandidate = Callable[[ir.Value, ir.Value, int], ir.Value]
"""(logits [B,C] of a row's candidates, their blocks [B,C/8], the row's index) -> [B,1], a candidate's index."""


def head_drafts(
    tail: TailBuilder,
    logits: ir.Value,
    rows: ir.Value,
    root: ir.Value,
    draw: Draw,
    draw_candidate: DrawCandidate | None = None,
) -> ir.Value:
    """The drafts of the next window: token ids [B,D]. Entries whose row is 0 have no meaning.

    rows [B,D]: the window's rows that make the drafts, 0 for none. logits [B,D,V]: of these rows.
    root [B,1]: the new root.
    draw: draws a token from logits. draw_candidate: returns that token's index, and reads only the candidates' logits.
    """
    op, head, count = tail.op, tail.head, tail.plan.next.drafts
    assert head is not None
    choices = candidate_choices(tail, head, logits, count)
    projected = op("MatMul", hidden_rows(tail, head, rows), head_matrix(op, head, "hidden"))
    projected = op("Add", projected, head_matrix(op, head, "bias"))  # [B,D,m]
    drafts: list[ir.Value] = []
    state: ir.Value | None = None
    for j in range(count):
        token = table_rows(op, head, op("Squeeze", drafts[-1] if drafts else root, op.const([1])))  # [B,r]
        x = op("Add", pick_row(op, projected, j), op("MatMul", token, head_matrix(op, head, "token")))
        if state is not None:
            x = op("Add", x, op("MatMul", state, head_matrix(op, head, "state")))
        state = op("Mul", x, op("Sigmoid", x))  # [B,m]
        scores = choices.scores(j, op("MatMul", state, head_matrix(op, head, "out")))
        if tail.sampler.sampler == "greedy":
            drafts.append(choices.best(j, scores))
        elif draw_candidate is not None and isinstance(choices, CandidateSubset):
            drafts.append(choices.token_ids(j, draw_candidate(scores, pick_row(op, choices.blocks, j), j)))
        else:
            drafts.append(draw(choices.vocabulary_logits(j, scores, tail.vocab_size), j))
    return op("Concat", *drafts, axis=1)


@dataclass(frozen=True)
class CandidateSubset:
    """C candidates in each row, a part of the vocabulary.

    blocks [B,D,C/8]: the blocks of all their tokens. ids [B,D,C]: the first token of every block, then the second of
    every block, and so on. logits [B,D,C]. vectors [B,D,C,r]: the candidates' rows of the head's table.
    """

    op: GraphTape
    blocks: ir.Value
    ids: ir.Value
    logits: ir.Value
    vectors: ir.Value

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        """The candidates' scores [B,C] in row j: logits plus table rows times direction [B,r]."""
        op = self.op
        products = op("MatMul", pick_row(op, self.vectors, j), op("Unsqueeze", direction, op.const([2])))
        return op("Add", pick_row(op, self.logits, j), op("Squeeze", products, op.const([2])))

    def best(self, j: int, scores: ir.Value) -> ir.Value:
        """[B,1]: the id of the candidate with the largest of `scores` [B,C]."""
        return self.token_ids(j, self.op("ArgMax", scores, axis=1, keepdims=1))

    def token_ids(self, j: int, index: ir.Value) -> ir.Value:
        """index [B,1] into row j's candidates -> [B,1] ids."""
        return self.op("GatherElements", pick_row(self.op, self.ids, j), index, axis=1)

    def vocabulary_logits(self, j: int, scores: ir.Value, vocab_size: int) -> ir.Value:
        """scores [B,C] -> logits [B,1,V]: minus infinity for tokens that are not candidates."""
        op = self.op
        batch = op("Shape", scores, start=0, end=1)
        excluded = op("Expand", op.const(-np.inf, F32), op("Concat", batch, op.const([vocab_size]), axis=0))
        row = op("ScatterElements", excluded, pick_row(op, self.ids, j), scores, axis=1)
        return op("Unsqueeze", row, op.const([1]))


@dataclass(frozen=True)
class FullVocabulary:
    """Every token is a candidate: logits [B,D,V], vectors [V,r]. Methods as in CandidateSubset."""

    op: GraphTape
    logits: ir.Value
    vectors: ir.Value

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        op = self.op
        return op("Add", pick_row(op, self.logits, j), op("Gemm", direction, self.vectors, transB=1))

    def best(self, _j: int, scores: ir.Value) -> ir.Value:
        return self.op("ArgMax", scores, axis=1, keepdims=1)

    def vocabulary_logits(self, _j: int, scores: ir.Value, _vocab_size: int) -> ir.Value:
        return self.op("Unsqueeze", scores, self.op.const([1]))


def candidate_choices(
    tail: TailBuilder, head: HeadArrays, logits: ir.Value, count: int
) -> CandidateSubset | FullVocabulary:
    """The candidates of `count` rows with these logits [B,count,V]."""
    op, vocab_size, size = tail.op, len(head.table), noise.BLOCK_SIZE
    if not has_candidate_subset(vocab_size):
        # With constant indices ONNX Runtime would fold the Gather and the Cast, and keep a float32 copy of the table.
        zero = op("Mul", op("ReduceMax", op.input("active", np.int64, ["batch"]), op.const([0])), op.const(0))
        return FullVocabulary(op, logits, table_rows(op, head, op("Add", op.const(np.arange(vocab_size)), zero)))
    blocks = noise.vocabulary_blocks(vocab_size)
    by_block = op("Reshape", logits, op.const([-1, count, size, blocks]))
    best = op("ReduceMax", by_block, op.const([2]), keepdims=0)
    _, chosen = op.pair("TopK", best, op.const([CANDIDATE_BLOCKS]), axis=-1, sorted=0)
    every = op("Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * np.arange(size)[:, None]))
    ids = op("Reshape", every, op.const([-1, count, size * CANDIDATE_BLOCKS]))
    return CandidateSubset(op, chosen, ids, op("GatherElements", logits, ids, axis=2), table_rows(op, head, ids))


def hidden_rows(tail: TailBuilder, head: HeadArrays, rows: ir.Value) -> ir.Value:
    """[B,D,H]: the hidden rows of the window's `rows` [B,D], which are look-ahead rows."""
    op, plan, size, count = tail.op, tail.plan, len(head.hidden), sum(tail.plan.groups)
    hidden = op.input("hidden", F32, ["batch", "lookahead_rows" if plan.is_fused else count, size])
    if not plan.is_fused:  # There is one group, and all its rows draft.
        return hidden
    indices = op("Max", op("Sub", rows, op.const(1 + plan.drafts)), op.const(0))
    return pick_rows(op, hidden, indices, tail.lookahead_count(), size)


def table_rows(op: GraphTape, head: HeadArrays, ids: ir.Value) -> ir.Value:
    """ids [...] -> rows of the table [...,r] float32. It casts after Gather, so that no engine stores a cast table."""
    stored = op("Gather", op.const(head.table, np.float16, f"{HEAD_PREFIX}table"), ids, axis=0)
    return op("Cast", stored, to=int(ir.DataType.FLOAT))


def head_matrix(op: GraphTape, head: HeadArrays, name: str) -> ir.Value:
    return op.const(getattr(head, name), F32, f"{HEAD_PREFIX}{name}")


def pick_row(op: GraphTape, values: ir.Value, j: int) -> ir.Value:
    """values[:, j]"""
    return op("Gather", values, op.const(j), axis=1)
