"""Top-k, top-p and min-p as ONNX operators: which probabilities of a row are kept.

Top-k and top-p keep some of a row's *candidates*, its K = min(MAX_CANDIDATES, V) most likely
tokens. B is the batch size, R the number of rows, V the vocabulary size.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.request_fields import MAX_CANDIDATES

F32 = np.float32
FIRST_CANDIDATES = 64
"""How many candidates are searched first. These suffice for the usual values of top-k. For a top-p
of 0.9 they suffice in 93 % of positions, and in 50 % of look-ahead rows."""
TOP_P_MARGIN = 1e-4
"""The first candidates suffice for top-p if the sum of their probabilities exceeds top-p by this,
which is more than the sum's rounding error."""


def largest_probabilities(op: GraphTape, p: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """Return the largest values [B,R,K] of each row of p [B,R,V] in falling order.

    If the first FIRST_CANDIDATES of a row suffice for top-k and top-p, the row's others are 0. The
    search for the others runs in every row, because a CUDA graph cannot branch. In rows that do not
    need it, TopK gets numbers that are sorted already, which takes a CPU a fifth of the time.
    """
    k = min(MAX_CANDIDATES, vocab_size)
    # The search by blocks looks at 8 * k tokens, so it is only for larger vocabularies.
    if vocab_size <= 2 * noise.BLOCK_SIZE * k:
        return op.pair("TopK", p, op.const([k]), axis=-1)[0]
    maxima = _block_maxima(op, p, rows, vocab_size)
    first = _largest(op, p, maxima, rows, FIRST_CANDIDATES, vocab_size)
    needs_others = op("Not", _are_sufficient(op, first))
    all_values = _largest(op, p, maxima, rows, k, vocab_size, needs_others)
    # Relu turns the negative numbers of rows that were not searched into 0.
    others = op(
        "Relu", op("Slice", all_values, op.const([FIRST_CANDIDATES]), op.const([k]), op.const([2]))
    )
    return op("Concat", first, others, axis=2)


def smallest_kept(op: GraphTape, values: ir.Value, candidates: int) -> ir.Value:
    """Return the least probability [B,R,1] that top-k, top-p and min-p keep; 0 if all are off.

    values [B,R,K]: the largest probabilities in falling order. candidates: K.
    """
    # What depends on the request alone comes first, so that all rows share these nodes.
    top_k, top_p = op.per_request("top_k", np.int64), op.per_request("top_p")
    no_k, no_p = op("Equal", top_k, op.const(0)), op("GreaterOrEqual", top_p, op.const(1, F32))
    rank_count = op("Where", no_k, op("Where", no_p, op.const(0), op.const(MAX_CANDIDATES)), top_k)
    # No rank is less than 0, if both are off.
    in_top_k = op("Less", op.const(np.arange(candidates).reshape(1, 1, -1)), rank_count)
    # A value is kept if the sum of the values before it is below the limit; 2 exceeds any sum.
    limit = op("Where", in_top_k, op("Where", no_p, op.const(2, F32), top_p), op.const(-1, F32))
    # What stands for a value that is not kept in the minimum; if both are off, the minimum is 0.
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
    """Return whether `first` [B,R,FIRST_CANDIDATES] suffice for top-k and top-p: bool [B,R,1]."""
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
    """Return the largest value [B,R,V/8] of each block; None if V is no multiple of its size."""
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
    """Return the k largest values [B,R,k] of p [B,R,V] in falling order.

    searched [B,R,1] bool: which rows are searched; the others get negative numbers. None searches
    all rows.
    block_maxima: if given, only the k blocks with the largest maxima are searched, which contain
    the k largest values. TopK over the whole vocabulary would be the slowest node of the graph.
    """
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
        # At least k values are not below the smallest of `largest`, so smaller ones are left out.
        if searched is not None:
            smallest = op("ReduceMin", largest, op.const([2]), keepdims=1)
            searched = op("And", searched, op("GreaterOrEqual", p, smallest))
    values = _with_falling_rest(op, searched, p, vocab_size)
    return op.pair("TopK", values, op.const([k]), axis=-1)[0]


def _with_falling_rest(
    op: GraphTape, searched: ir.Value | None, values: ir.Value, count: int
) -> ir.Value:
    """Return `values` [B,R,count] where `searched`, and falling negative numbers elsewhere."""
    return (
        values
        if searched is None
        else op("Where", searched, values, op.const(-np.arange(1, count + 1), F32))
    )
