"""The draft head of `pass_exporter.tails.definitions` as ONNX operators, for tails that draft.

A tail with a head has one more input:

    hidden         [B,A,H] float32   the trunk's hidden states, one per look-ahead row

What does not depend on earlier drafts is computed for all drafts at once; the rest is unrolled,
draft by draft. In shapes, m and r are the width and the rank of `HeadArrays`, C is the number of
candidate tokens; other letters are those of `tails.match`.
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
    """Return the drafts [B,D] of the next window. A draft whose row is 0 has no meaning.

    rows [B,D]: the window's rows that make the drafts, or 0. logits [B,D,V]: those of the rows.
    root [B,1]: the new root. choose: chooses each draft.
    """
    op, head, count = tail.op, tail.head, tail.plan.next.drafts
    assert head is not None
    choices = candidate_choices(tail, head, logits, count)
    projected = op("Unsqueeze", projected_rows(tail, head, rows), op.const([2]))
    projected_by_row = op.split(projected, [1] * count, axis=1)  # [B,1,1,m] each
    drafts: list[ir.Value] = []
    token, state = op("Unsqueeze", root, op.const([2])), None  # [B,1,1]; later states [B,1,1,m]
    for j in range(count):
        state = next_state(op, head, projected_by_row[j], token, state)
        scores = choices.scores(j, op("MatMul", state, head_array(op, head, "out")))  # [B,1,C]
        token = choose(choices, scores, j)
        drafts.append(token)
    return op("Squeeze", op("Concat", *drafts, axis=1), op.const([2]))


def next_state(
    op: GraphTape, head: HeadArrays, projected: ir.Value, tokens: ir.Value, before: ir.Value | None
) -> ir.Value:
    """Return the head's states [...,m] in look-ahead rows. tokens [...]: the token before each row.

    projected [...,m]: the rows' part of the states, from `projected_rows`. before [...,m]: the
    states in the rows before; None in the first row of a group.
    """
    x = op(
        "Add", projected, op("MatMul", table_rows(op, head, tokens), head_array(op, head, "token"))
    )
    if before is not None:
        x = op("Add", x, op("MatMul", before, head_array(op, head, "state")))
    return op("Mul", x, op("Sigmoid", x))


@dataclass(frozen=True)
class CandidateSubset:
    """The candidate tokens of D rows if they are a part of the vocabulary, C in each row.

    blocks [B,D,C/8]: the blocks that they form. For each row: ids [B,1,C], first the first tokens
    of all blocks, then the second tokens, and so on; the candidates' logits [B,1,C]; and their
    vectors [B,1,C,r], which are rows of the head's table.
    """

    op: GraphTape
    blocks: ir.Value
    ids: Sequence[ir.Value]
    logits: Sequence[ir.Value]
    vectors: Sequence[ir.Value]

    def scores(self, j: int, direction: ir.Value) -> ir.Value:
        """Return the logits [B,1,C] for draft j. direction [B,1,1,r]: the head's state @ out."""
        op, count = self.op, noise.BLOCK_SIZE * CANDIDATE_BLOCKS
        # [B,1,C,1]
        products = op("MatMul", self.vectors[j], op("Reshape", direction, op.const([0, 1, -1, 1])))
        return op("Add", self.logits[j], op("Reshape", products, op.const([-1, 1, count])))

    def best(self, j: int, scores: ir.Value) -> ir.Value:
        """Return the id [B,1,1] of row j's candidate with the largest of scores [B,1,C]."""
        return self.token_ids(j, self.op("ArgMax", scores, axis=2, keepdims=1))

    def token_ids(self, j: int, index: ir.Value) -> ir.Value:
        """Return the ids [B,1,n] of the candidates `index` [B,1,n] of row j."""
        return self.op("GatherElements", self.ids[j], index, axis=2)

    def vocabulary_logits(self, j: int, scores: ir.Value, vocab_size: int) -> ir.Value:
        """Return scores [B,1,C] as logits [B,1,V]: -inf for tokens that are not candidates."""
        op = self.op
        batch = op("Shape", scores, start=0, end=1)
        excluded = op(
            "Expand", op.const(-np.inf, F32), op("Concat", batch, op.const([1, vocab_size]), axis=0)
        )
        return op("ScatterElements", excluded, self.ids[j], scores, axis=2)


@dataclass(frozen=True)
class FullVocabulary:
    """In place of `CandidateSubset` if all tokens are candidates. logits: [B,1,V] by row.
    vectors: [V,r]."""

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
    """Return the candidate tokens of `count` rows with these logits [B,count,V]."""
    op, vocab_size, size = tail.op, len(head.table), noise.BLOCK_SIZE

    def by_row(values: ir.Value) -> Sequence[ir.Value]:
        return op.split(values, [1] * count, axis=1)

    if not has_candidate_subset(vocab_size):
        # The indices must depend on an input: with constant indices ONNX Runtime would fold the
        # Gather and the Cast, and keep a float32 copy of the table.
        any_active = op("ReduceMax", op.input("active", np.int64, ["batch"]), op.const([0]))
        zero = op("Mul", any_active, op.const(0))
        rows = by_row(logits)
        ids = op("Add", op.const(np.arange(vocab_size)), zero)
        return FullVocabulary(op, rows, table_rows(op, head, ids))
    blocks = noise.vocabulary_blocks(vocab_size)
    by_block = op("Reshape", logits, op.const([-1, count, size, blocks]))
    maxima = op("ReduceMax", by_block, op.const([2]), keepdims=0)
    _, chosen = op.pair("TopK", maxima, op.const([CANDIDATE_BLOCKS]), axis=-1, sorted=0)
    # Token i of block k has the id i * blocks + k.
    ids = op(
        "Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * np.arange(size)[:, None])
    )
    ids = op("Reshape", ids, op.const([-1, count, size * CANDIDATE_BLOCKS]))
    candidate_logits = op("GatherElements", logits, ids, axis=2)
    return CandidateSubset(
        op, chosen, by_row(ids), by_row(candidate_logits), by_row(table_rows(op, head, ids))
    )


def projected_rows(tail: TailBuilder, head: HeadArrays, rows: ir.Value) -> ir.Value:
    """Return the part [B,D,m] of the head's states that comes from the look-ahead `rows` [B,D]."""
    op, plan, size, count = tail.op, tail.plan, len(head.hidden), sum(tail.plan.groups)
    hidden = op.input("hidden", F32, ["batch", "lookahead_rows" if plan.is_fused else count, size])
    if plan.is_fused:  # Otherwise there is one group, and all its rows draft.
        lookahead_index = op("Max", op("Sub", rows, op.const(1 + plan.drafts)), op.const(0))
        hidden = tail.pick_rows(hidden, lookahead_index, tail.lookahead_count(), size)
    return op(
        "Add", op("MatMul", hidden, head_array(op, head, "hidden")), head_array(op, head, "bias")
    )


def table_rows(op: GraphTape, head: HeadArrays, ids: ir.Value) -> ir.Value:
    """Return the rows [...,r] float32 of the table for ids [...].

    The rows are cast after the Gather, so that no engine keeps a cast copy of the table.
    """
    stored = op("Gather", op.const(head.table, np.float16, f"{HEAD_PREFIX}table"), ids, axis=0)
    return op("Cast", stored, to=int(ir.DataType.FLOAT))


def head_array(op: GraphTape, head: HeadArrays, name: str) -> ir.Value:
    """Return the float32 array `name` of `HeadArrays` as a constant."""
    return op.const(getattr(head, name), F32, f"{HEAD_PREFIX}{name}")
