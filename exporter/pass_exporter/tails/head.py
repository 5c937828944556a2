"""The draft head of `pass_exporter.tails.definitions` as ONNX operators, for tails that draft.

A tail with a head has one more input:

    hidden         [B,A,H] float32   the trunk's, one row per look-ahead row

The terms without recurrence are computed once for all drafts; the recurrence over drafts is
unrolled.
"""

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
    """Return the drafts of the next window: token ids [B,D]. Entries of row 0 have no meaning.

    rows [B,D]: the window's rows that make the drafts, 0 for none. logits [B,D,V]: of these rows.
    root [B,1]: the new root.
    """
    op, head, count = tail.op, tail.head, tail.plan.next.drafts
    assert head is not None
    choices = candidate_choices(tail, head, logits, count)
    projected = op("Unsqueeze", projected_rows(tail, head, rows), op.const([2]))
    projected_row = op.split(projected, [1] * count, axis=1)  # [B,1,1,m] each
    drafts: list[ir.Value] = []
    token, state = op("Unsqueeze", root, op.const([2])), None  # [B,1,1], and later [B,1,1,m]
    for j in range(count):
        state = next_state(op, head, projected_row[j], token, state)
        scores = choices.scores(j, op("MatMul", state, head_matrix(op, head, "out")))  # [B,1,C]
        token = choose(choices, scores, j)
        drafts.append(token)
    return op("Squeeze", op("Concat", *drafts, axis=1), op.const([2]))


def next_state(
    op: GraphTape, head: HeadArrays, projected: ir.Value, tokens: ir.Value, before: ir.Value | None
) -> ir.Value:
    """Return the head's states [...,m] after `tokens` [...], each after a state `before` or none.

    projected [...,m]: the part of the states that comes from the look-ahead row, from
    `projected_rows`.
    """
    x = op(
        "Add", projected, op("MatMul", table_rows(op, head, tokens), head_matrix(op, head, "token"))
    )
    if before is not None:
        x = op("Add", x, op("MatMul", before, head_matrix(op, head, "state")))
    return op("Mul", x, op("Sigmoid", x))


@dataclass(frozen=True)
class CandidateSubset:
    """C candidates in each of D rows, a part of the vocabulary.

    blocks [B,D,C/8]: the blocks of all their tokens. By row: ids [B,1,C], the first token of every
    block, then the second of every block, and so on; their logits [B,1,C], and their vectors
    [B,1,C,r], rows of the head's table.
    """

    op: GraphTape
    blocks: ir.Value
    ids: Sequence[ir.Value]
    logits: Sequence[ir.Value]
    vectors: Sequence[ir.Value]

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        """Return the scores [B,1,C] of row j: logits plus rows times `direction` [B,1,1,r]."""
        op, count = self.op, noise.BLOCK_SIZE * CANDIDATE_BLOCKS
        # [B,1,C,1]
        products = op("MatMul", self.vectors[j], op("Reshape", direction, op.const([0, 1, -1, 1])))
        return op("Add", self.logits[j], op("Reshape", products, op.const([-1, 1, count])))

    def best(self, j: int, scores: ir.Value) -> ir.Value:
        """[B,1,1]: the id of the candidate with the largest of `scores` [B,1,C]."""
        return self.token_ids(j, self.op("ArgMax", scores, axis=2, keepdims=1))

    def token_ids(self, j: int, index: ir.Value) -> ir.Value:
        """index [B,1,n] into row j's candidates -> [B,1,n] ids."""
        return self.op("GatherElements", self.ids[j], index, axis=2)

    def vocabulary_logits(self, j: int, scores: ir.Value, vocab_size: int) -> ir.Value:
        """scores [B,1,C] -> logits [B,1,V]: minus infinity for tokens that are not candidates."""
        op = self.op
        batch = op("Shape", scores, start=0, end=1)
        excluded = op(
            "Expand", op.const(-np.inf, F32), op("Concat", batch, op.const([1, vocab_size]), axis=0)
        )
        return op("ScatterElements", excluded, self.ids[j], scores, axis=2)


@dataclass(frozen=True)
class FullVocabulary:
    """Has every token as a candidate: logits [B,1,V] by row, vectors [V,r]. See CandidateSubset."""

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
"""(choices, their scores [B,1,C] in a row, the row's index) -> the drafted id [B,1,1]."""


def candidate_choices(tail: TailBuilder, head: HeadArrays, logits: ir.Value, count: int) -> Choices:
    """Return the candidates of `count` rows with these logits [B,count,V]."""
    op, vocab_size, size = tail.op, len(head.table), noise.BLOCK_SIZE

    def by_row(values: ir.Value) -> Sequence[ir.Value]:
        return op.split(values, [1] * count, axis=1)

    if not has_candidate_subset(vocab_size):
        # With constant indices ONNX Runtime would fold the Gather and the Cast, and keep a float32
        # copy of the table.
        zero = op(
            "Mul",
            op("ReduceMax", op.input("active", np.int64, ["batch"]), op.const([0])),
            op.const(0),
        )
        return FullVocabulary(
            op,
            by_row(logits),
            table_rows(op, head, op("Add", op.const(np.arange(vocab_size)), zero)),
        )
    blocks = noise.vocabulary_blocks(vocab_size)
    by_block = op("Reshape", logits, op.const([-1, count, size, blocks]))
    best = op("ReduceMax", by_block, op.const([2]), keepdims=0)
    _, chosen = op.pair("TopK", best, op.const([CANDIDATE_BLOCKS]), axis=-1, sorted=0)
    every = op(
        "Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * np.arange(size)[:, None])
    )
    ids = op("Reshape", every, op.const([-1, count, size * CANDIDATE_BLOCKS]))
    picked = op("GatherElements", logits, ids, axis=2)
    return CandidateSubset(
        op, chosen, by_row(ids), by_row(picked), by_row(table_rows(op, head, ids))
    )


def projected_rows(tail: TailBuilder, head: HeadArrays, rows: ir.Value) -> ir.Value:
    """[B,D,m]: the head's hidden states of the window's `rows` [B,D], which are look-ahead rows,
    before the tokens."""
    op, plan, size, count = tail.op, tail.plan, len(head.hidden), sum(tail.plan.groups)
    hidden = op.input("hidden", F32, ["batch", "lookahead_rows" if plan.is_fused else count, size])
    if plan.is_fused:  # Otherwise there is one group, and all its rows draft.
        indices = op("Max", op("Sub", rows, op.const(1 + plan.drafts)), op.const(0))
        hidden = tail.pick_rows(hidden, indices, tail.lookahead_count(), size)
    return op(
        "Add", op("MatMul", hidden, head_matrix(op, head, "hidden")), head_matrix(op, head, "bias")
    )


def table_rows(op: GraphTape, head: HeadArrays, ids: ir.Value) -> ir.Value:
    """ids [...] -> rows of the table [...,r] float32, cast last: no engine stores a cast table."""
    stored = op("Gather", op.const(head.table, np.float16, f"{HEAD_PREFIX}table"), ids, axis=0)
    return op("Cast", stored, to=int(ir.DataType.FLOAT))


def head_matrix(op: GraphTape, head: HeadArrays, name: str) -> ir.Value:
    return op.const(getattr(head, name), F32, f"{HEAD_PREFIX}{name}")
