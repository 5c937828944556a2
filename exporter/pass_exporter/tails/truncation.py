"""Top-k, top-p and min-p as ONNX operators. *Candidates*: a row's K most likely tokens."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.sampling import MAX_CANDIDATES

F32 = np.float32
FIRST_CANDIDATES = 64
"""Searched first: enough for a top-p of 0.9 in 93 % of positions."""
TOP_P_MARGIN = 1e-4
"""More than the rounding error of the first candidates' sum."""


def largest_probabilities(op: GraphTape, p: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """Return the largest values [B,R,K] of p [B,R,V], falling. If the first candidates suffice,
    the others are 0: a CUDA graph cannot branch, but searching sorted numbers takes a CPU a
    fifth of the time."""
    k = min(MAX_CANDIDATES, vocab_size)
    # The search by blocks looks at 8 * k tokens.
    if vocab_size <= 2 * noise.BLOCK_SIZE * k:
        return op.pair("TopK", p, op.const([k]), axis=-1)[0]
    maxima = _block_maxima(op, p, rows, vocab_size)
    first = _largest(op, p, maxima, rows, FIRST_CANDIDATES, vocab_size)
    needs_others = op("Not", _are_sufficient(op, first))
    all_values = _largest(op, p, maxima, rows, k, vocab_size, needs_others)
    # Relu makes 0 of rows that were not searched.
    others = op(
        "Relu", op("Slice", all_values, op.const([FIRST_CANDIDATES]), op.const([k]), op.const([2]))
    )
    return op("Concat", first, others, axis=2)


def smallest_kept(op: GraphTape, values: ir.Value, candidates: int) -> ir.Value:
    """Return the least kept probability [B,R,1], 0 if all is off, by the largest values [B,R,K]."""
    # Rows share what depends on the request alone.
    top_k, top_p = op.per_request("top_k", np.int64), op.per_request("top_p")
    no_k, no_p = op("Equal", top_k, op.const(0)), op("GreaterOrEqual", top_p, op.const(1, F32))
    rank_count = op("Where", no_k, op("Where", no_p, op.const(0), op.const(MAX_CANDIDATES)), top_k)
    # No rank is below 0, if both are off.
    in_top_k = op("Less", op.const(np.arange(candidates).reshape(1, 1, -1)), rank_count)
    # Keep a value if the sum before it is below the limit; 2 exceeds any sum.
    limit = op("Where", in_top_k, op("Where", no_p, op.const(2, F32), top_p), op.const(-1, F32))
    # Stands for values that are not kept; 0 if both are off.
    unkept = op("Where", op("And", no_k, no_p), op.const(0, F32), op.const(2, F32))

    axis = op.const([2])
    of_top_k = op("Where", in_top_k, values, op.const(0, F32))
    total = op("Where", no_k, op.const(1, F32), op("ReduceSum", of_top_k, axis, keepdims=1))
    sum_before = op("CumSum", op("Div", of_top_k, total), op.const(2), exclusive=1)
    smallest = op(
        "ReduceMin", op("Where", op("Less", sum_before, limit), values, unkept), axis, keepdims=1
    )
    largest = op("Slice", values, op.const([0]), op.const([1]), axis)
    return op("Max", smallest, op("Mul", op.per_request("min_p"), largest))


def _are_sufficient(op: GraphTape, first: ir.Value) -> ir.Value:
    top_k, top_p = op.per_request("top_k", np.int64), op.per_request("top_p")
    mass = op("ReduceSum", first, op.const([2]), keepdims=1)
    reached = op("Greater", mass, op("Add", top_p, op.const(TOP_P_MARGIN, F32)))
    no_p = op("GreaterOrEqual", top_p, op.const(1, F32))
    by_p = op("And", op("Equal", top_k, op.const(0)), op("Or", no_p, reached))
    by_k = op(
        "And",
        op("Greater", top_k, op.const(0)),
        op("LessOrEqual", top_k, op.const(FIRST_CANDIDATES)),
    )
    return op("Or", by_p, by_k)


def _block_maxima(op: GraphTape, p: ir.Value, rows: int, vocab_size: int) -> ir.Value | None:
    size, blocks = noise.BLOCK_SIZE, noise.vocabulary_blocks(vocab_size)
    if vocab_size != size * blocks:
        return None
    return op(
        "ReduceMax", op("Reshape", p, op.const([-1, rows, size, blocks])), op.const([2]), keepdims=0
    )


def _largest(
    op: GraphTape,
    p: ir.Value,
    block_maxima: ir.Value | None,
    rows: int,
    k: int,
    vocab_size: int,
    searched: ir.Value | None = None,
) -> ir.Value:
    """Return the k largest of p [B,R,V], falling, where `searched` [B,R,1]; negative ones
    elsewhere. Only the k blocks with the largest maxima are searched: a TopK of the vocabulary
    would be the slowest node."""
    if block_maxima is not None:
        blocks, tokens = noise.vocabulary_blocks(vocab_size), np.arange(noise.BLOCK_SIZE)[:, None]
        falling = _with_falling_rest(op, searched, block_maxima, blocks)
        largest, chosen = op.pair("TopK", falling, op.const([k]), axis=-1, sorted=0)
        ids = op("Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * tokens))
        p = op(
            "GatherElements",
            p,
            op("Reshape", ids, op.const([-1, rows, k * noise.BLOCK_SIZE])),
            axis=2,
        )
        vocab_size = k * noise.BLOCK_SIZE
        # Smaller ones are left out: at least k are not below the smallest of `largest`.
        if searched is not None:
            smallest = op("ReduceMin", largest, op.const([2]), keepdims=1)
            searched = op("And", searched, op("GreaterOrEqual", p, smallest))
    values = _with_falling_rest(op, searched, p, vocab_size)
    return op.pair("TopK", values, op.const([k]), axis=-1)[0]


def _with_falling_rest(
    op: GraphTape, searched: ir.Value | None, values: ir.Value, count: int
) -> ir.Value:
    """values [B,R,count] where `searched`, falling negative numbers elsewhere."""
    return (
        values
        if searched is None
        else op("Where", searched, values, op.const(-np.arange(1, count + 1), F32))
    )
