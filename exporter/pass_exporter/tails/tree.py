"""The tail of a tree of drafts: accepts a path of the tree, and computes the next tree.

The contract is that of `tails.match`, with one more output:

    emitted_rows   [B,E] int64       the window row that each emitted token was drawn from; the
                                     first `count` are valid, as in `emitted`

A draft is accepted if its parent row is accepted and the token drawn in the parent row equals it.
Siblings differ, so at most one of them is accepted. The runtime then moves the K/V of the accepted
rows to consecutive entries.

The next tree has the same shape. The children of a row are the tokens with the largest scores of
the draft head (`pass_exporter.tails.definitions`) after the draft in that row. The first child is
the one that a chain would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder, columns
from pass_exporter.tails.head import (
    CandidateSubset,
    candidate_choices,
    head_matrix,
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
    logits, places = columns(op, tail.logits, 0, verified), plan.row_position[:verified].tolist()
    window = None
    if sampler == "greedy":
        samples = op("ArgMax", logits, axis=-1, keepdims=0)  # [B,D+1]
    else:
        window = WindowNoise.after(tail, tail.length, 1 + max(places) + plan.depth, "noise_offsets")
        samples = window.sample(logits, places)
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
    """samples [B,D+1] -> the number of accepted drafts and the row of the last one (0 if none),
    [B,1] each."""
    op, plan = tail.op, tail.plan
    drafts = columns(op, tail.input_ids(), 1, 1 + plan.drafts)
    drawn = op("Gather", samples, op.const(np.array(plan.parents)), axis=1)
    wrong = op("Cast", op("Not", op("Equal", drafts, drawn)), to=int(ir.DataType.FLOAT))
    drafts_mask = plan.window_mask[1 : 1 + plan.drafts, 1 : 1 + plan.drafts]
    on_path = drafts_mask.T  # (i, j): draft i is draft j or an ancestor of it
    # [B,D]: the number of wrong drafts on the path.
    wrong = op("MatMul", wrong, op.const(on_path, np.float32))
    depth = op.const(plan.row_position[None, 1 : 1 + plan.drafts], np.float32)
    # Drafts that are not accepted get -1, the root 0, so the maximum is unique: engines differ in
    # ArgMax of ties. They are floats, because on CUDA ArgMax and Pad take no integers.
    reached = op(
        "Where", op("Less", wrong, op.const(0.5, np.float32)), depth, op.const(-1, np.float32)
    )
    reached = op("Pad", reached, op.const([0, 1, 0, 0]))  # the root is always accepted
    accepted = op(
        "Cast", op("ReduceMax", reached, op.const([1]), keepdims=1), to=int(ir.DataType.INT64)
    )
    return accepted, op("ArgMax", reached, axis=1, keepdims=1)


def _next_drafts(
    tail: TailBuilder, last: ir.Value, root: ir.Value, chain: ChainNoise | None
) -> ir.Value:
    """[B,D]: the next drafts in window order, by the look-ahead rows after row `last` [B,1].

    The id of a draft is V if its look-ahead row is missing. chain: the noise of every depth; None
    if greedy.
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
    level, made, order = _Level([0], root, None), [], []
    for depth in range(plan.depth):
        children = [
            (c, p)
            for p in level.rows
            for c in range(1, 1 + plan.drafts)
            if plan.parents[c - 1] == p
        ]
        state = next_state(op, head, projected[depth], level.tokens, level.states)  # [B,n,m]
        places = _parent_ranks(level, children)
        tokens = _ranked_tokens(tail, choices, depth, state, places, noise_of[depth])
        made.append(tokens)
        order += [c for c, _ in children]
        level = _next_level(op, plan, level, children, tokens, state)
    drafts = op("Gather", op("Concat", *made, axis=1), op.const(np.argsort(order)), axis=1)
    # [B,D]
    by_draft = op("Gather", rows, op.const(plan.row_position[1 : 1 + plan.drafts] - 1), axis=1)
    return op("Where", op("Equal", by_draft, op.const(0)), op.const(tail.vocab_size), drafts)


@dataclass(frozen=True)
class _Level:
    """The rows of one depth that have children.

    rows: their numbers in the window. tokens: [B,n]. states: the draft head's states [B,n,m] of
    their parents; None for the root.
    """

    rows: list[int]
    tokens: ir.Value
    states: ir.Value | None


def _parent_ranks(level: _Level, children: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each child (row, parent row): its parent's index in the level, and its own rank."""
    parents = [parent for _, parent in children]
    return [
        (level.rows.index(parent), parents[:i].count(parent)) for i, parent in enumerate(parents)
    ]


def _ranked_tokens(
    tail: TailBuilder,
    choices: CandidateSubset,
    depth: int,
    states: ir.Value,
    places: list[tuple[int, int]],
    noise_of: RowNoise | None,
) -> ir.Value:
    """[B,K]: for each of K places (index of a state, rank), the token of that rank by the head."""
    op, head = tail.op, tail.head
    assert head is not None
    count, ranks = 1 + max(i for i, _ in places), 1 + max(rank for _, rank in places)
    direction = op("MatMul", states, head_matrix(op, head, "out"))  # [B,n,r]
    # [B,r,C]
    vectors = op("Transpose", op("Squeeze", choices.vectors[depth], op.const([1])), perm=[0, 2, 1])
    scores = op("Add", choices.logits[depth], op("MatMul", direction, vectors))  # [B,n,C]
    ranked = scores if noise_of is None else tail.sampler.rank_candidates(scores, count, noise_of)
    _, best = op.pair("TopK", ranked, op.const([ranks]), axis=-1)
    flat = op("Reshape", best, op.const([-1, 1, count * ranks]))
    kept = op("Gather", flat, op.const([i * ranks + rank for i, rank in places]), axis=2)
    return op("Squeeze", choices.token_ids(depth, kept), op.const([1]))


def _next_level(
    op: GraphTape,
    plan: Plan,
    level: _Level,
    children: list[tuple[int, int]],
    tokens: ir.Value,
    states: ir.Value,
) -> _Level:
    """Return the level of children that have children, or `level`. tokens: the children's [B,K]."""
    followed = [(i, c, p) for i, (c, p) in enumerate(children) if c in plan.parents]
    if not followed:
        return level
    return _Level(
        [c for _, c, _ in followed],
        op("Gather", tokens, op.const([i for i, _, _ in followed]), axis=1),
        op("Gather", states, op.const([level.rows.index(p) for _, _, p in followed]), axis=1),
    )
