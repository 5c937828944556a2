"""Builds the tail of a tree of drafts, which accepts a path of the tree and drafts the next tree.

The contract is that of `tails.match`, with one more output:

    emitted_rows   [B,E] int64       the window row that each emitted token was drawn from; the
                                     first `count` are valid, as in `emitted`

The root is always accepted. A draft is accepted if its parent row is accepted and the token drawn
in the parent row equals the draft. The children of a row differ, so at most one of them is
accepted. The runtime then moves the K/V of the accepted rows to consecutive entries.

The next tree has the same shape. The children of a row are the tokens that the draft head
(`pass_exporter.tails.definitions`) ranks highest after the row's token. The first child is the one
that a chain would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, slice_rows
from pass_exporter.tails.head import (
    CandidateSubset,
    candidate_choices,
    head_array,
    next_state,
    projected_rows,
)
from pass_exporter.tails.noise_nodes import RowNoise
from pass_exporter.tails.tape import GraphTape
from pass_exporter.tails.window_noise import ChainNoise, WindowNoise
from pass_runtime.bundle.head import HeadArrays
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.sampling import Sampler


def build_tree_tail(
    plan: Plan, sampler: Sampler, vocab_size: int, head: HeadArrays | None
) -> ir.Model:
    """Build the tail of a tree for the exact-match rule.

    Raises ValueError if there is no draft head, or the vocabulary is so small that all its tokens
    are candidates.
    """
    tail = TailBuilder(f"tail.{plan.tail}.{sampler}", plan, sampler, vocab_size, head)
    op, verified = tail.op, plan.drafts + 1
    logits = slice_rows(op, tail.logits, 0, verified)
    window = None
    if sampler == "greedy":
        samples = op("ArgMax", logits, axis=-1, keepdims=0)  # [B,D+1]
    else:
        # The pass draws for D+1 rows of depth 0 .. depth, and then for drafts `depth` levels deep.
        window = WindowNoise.after(tail, tail.length, 1 + 2 * plan.depth, "noise_offsets")
        samples = window.sample(logits, plan.row_position[:verified].tolist())
    accepted, last = _last_accepted(tail, samples)
    rows = op("Gather", op.const(plan.paths), op("Squeeze", last, op.const([1])), axis=0)  # [B,E]
    count, next_length = tail.advance(accepted)
    root = op("GatherElements", samples, last, axis=1)
    chain = None if window is None else ChainNoise(window, accepted, plan.depth)
    drafts = _next_drafts(tail, last, root, chain)
    return op.model(
        {
            "emitted": (
                op("GatherElements", samples, rows, axis=1),
                np.int64,
                ["batch", plan.max_emitted],
            ),
            "emitted_rows": (rows, np.int64, ["batch", plan.max_emitted]),
            "count": (count, np.int64, ["batch"]),
            "next_ids": (tail.next_window(root, drafts), np.int64, ["batch", tail.next_width]),
            "next_length": (next_length, np.int64, ["batch"]),
        }
    )


def _last_accepted(tail: TailBuilder, samples: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return how many drafts are accepted and the row of the last one (0 if none), [B,1] each.
    samples [B,D+1]: the tokens drawn in the rows of root and drafts."""
    op, plan = tail.op, tail.plan
    drafts = slice_rows(op, tail.input_ids(), 1, 1 + plan.drafts)
    drawn = op("Gather", samples, op.const(np.array(plan.parents)), axis=1)
    is_wrong = op("Cast", op("Not", op("Equal", drafts, drawn)), to=int(ir.DataType.FLOAT))
    drafts_mask = plan.window_mask[1 : 1 + plan.drafts, 1 : 1 + plan.drafts]
    on_path = drafts_mask.T  # (i, j): draft i is draft j or an ancestor of it
    # [B,D]: how many drafts are wrong on the path from the root to each draft.
    wrong_count = op("MatMul", is_wrong, op.const(on_path, np.float32))
    depth = op.const(plan.row_position[None, 1 : 1 + plan.drafts], np.float32)
    # Accepted drafts get their depth, others -1, and the root, which is always accepted, 0. So the
    # maximum is unique: engines differ in ArgMax of ties. These numbers are floats, because on CUDA
    # ArgMax and Pad take no integers.
    is_accepted = op("Less", wrong_count, op.const(0.5, np.float32))
    depths = op("Where", is_accepted, depth, op.const(-1, np.float32))
    depths = op("Pad", depths, op.const([0, 1, 0, 0]))  # puts the root's 0 first
    accepted = op(
        "Cast", op("ReduceMax", depths, op.const([1]), keepdims=1), to=int(ir.DataType.INT64)
    )
    return accepted, op("ArgMax", depths, axis=1, keepdims=1)


def _next_drafts(
    tail: TailBuilder, last: ir.Value, root: ir.Value, chain: ChainNoise | None
) -> ir.Value:
    """Return the next drafts [B,D] in window order, by the look-ahead rows after row `last` [B,1].

    The id of a draft is V if there is no look-ahead row for its depth. chain: the noise of every
    depth; None if greedy.
    """
    op, plan, head = tail.op, tail.plan, tail.head
    rows, logits = tail.group_rows(last)  # [B,L'] and [B,L',V]
    choices = None if head is None else candidate_choices(tail, head, logits, plan.depth)
    if head is None or not isinstance(choices, CandidateSubset):
        raise ValueError(
            f"{plan.name} needs a draft head, and a vocabulary of which the candidates are a part"
        )
    projected = op.split(projected_rows(tail, head, rows), [1] * plan.depth, axis=1)  # [B,1,m] each
    noise_of = [None] * plan.depth if chain is None else chain.of_candidates(choices.blocks)
    level = _Level([0], root, None)
    tokens_by_depth: list[ir.Value] = []
    row_order: list[int] = []  # the rows of the drafts in `tokens_by_depth`
    for depth in range(plan.depth):
        children = [
            (row, parent)
            for parent in level.rows
            for row in range(1, 1 + plan.drafts)
            if plan.parents[row - 1] == parent
        ]
        states = next_state(op, head, projected[depth], level.tokens, level.states)  # [B,n,m]
        ranks = _parent_ranks(level, children)
        tokens = _ranked_tokens(tail, choices, depth, states, ranks, noise_of[depth])
        tokens_by_depth.append(tokens)
        row_order += [row for row, _ in children]
        level = _next_level(op, plan, level, children, tokens, states)
    drafts = op("Concat", *tokens_by_depth, axis=1)
    drafts = op("Gather", drafts, op.const(np.argsort(row_order)), axis=1)
    # [B,D]: the look-ahead row that makes each draft, or 0.
    row_of_draft = op("Gather", rows, op.const(plan.row_position[1 : 1 + plan.drafts] - 1), axis=1)
    return op("Where", op("Equal", row_of_draft, op.const(0)), op.const(tail.vocab_size), drafts)


@dataclass(frozen=True)
class _Level:
    """The n rows of one depth that have children: their indices in the window, their tokens [B,n],
    and the draft head's states [B,n,m] that chose these tokens, None for the root."""

    rows: list[int]
    tokens: ir.Value
    states: ir.Value | None


def _parent_ranks(level: _Level, children: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return for each child (row, parent row) its parent's index in the level, and its rank among
    the parent's children."""
    parents = [parent for _, parent in children]
    return [
        (level.rows.index(parent), parents[:i].count(parent)) for i, parent in enumerate(parents)
    ]


def _ranked_tokens(
    tail: TailBuilder,
    choices: CandidateSubset,
    depth: int,
    states: ir.Value,
    parent_ranks: list[tuple[int, int]],
    noise_of: RowNoise | None,
) -> ir.Value:
    """Return the tokens [B,K] of K children. states [B,n,m]: the draft head's states.

    parent_ranks: for each child, the index of its parent's state, and the rank that the head gives
    its token after the parent; 0 is the highest rank.
    """
    op, head = tail.op, tail.head
    assert head is not None
    n, rank_count = 1 + max(i for i, _ in parent_ranks), 1 + max(rank for _, rank in parent_ranks)
    direction = op("MatMul", states, head_array(op, head, "out"))  # [B,n,r]
    # [B,r,C]
    vectors = op("Transpose", op("Squeeze", choices.vectors[depth], op.const([1])), perm=[0, 2, 1])
    scores = op("Add", choices.logits[depth], op("MatMul", direction, vectors))  # [B,n,C]
    keys = scores if noise_of is None else tail.sampler.rank_candidates(scores, n, noise_of)
    _, best = op.pair("TopK", keys, op.const([rank_count]), axis=-1)
    flat = op("Reshape", best, op.const([-1, 1, n * rank_count]))
    chosen = op.const([i * rank_count + rank for i, rank in parent_ranks])
    kept = op("Gather", flat, chosen, axis=2)
    return op("Squeeze", choices.token_ids(depth, kept), op.const([1]))


def _next_level(
    op: GraphTape,
    plan: Plan,
    level: _Level,
    children: list[tuple[int, int]],
    tokens: ir.Value,
    states: ir.Value,
) -> _Level:
    """Return the level of the children (row, parent row) that have children; `level` if none has.

    tokens [B,K]: those of the children. states [B,n,m]: those of the rows of `level`.
    """
    indices = [i for i, (row, _) in enumerate(children) if row in plan.parents]
    if not indices:
        return level
    parents = [level.rows.index(children[i][1]) for i in indices]
    return _Level(
        [children[i][0] for i in indices],
        op("Gather", tokens, op.const(indices), axis=1),
        op("Gather", states, op.const(parents), axis=1),
    )
