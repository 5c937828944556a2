"""The sampler of `pass_runtime.bundle.reference` as ONNX operators, for the tail graphs.

Only operators that TensorRT-RTX takes: no modulo chains, no bitwise operators, TopK with a constant k.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import BLOCKS
from pass_runtime.bundle.sampling import MAX_CANDIDATES, MIN_TEMPERATURE, Sampler

F32 = np.float32
FEW = 64
"""Candidates that are looked at first: they hold most people's top-k, and a nucleus of 0.9 in 93 of 100 places (in half
of the places where look-ahead rows guess)."""
SURELY = 1e-4
"""More than rounding can change a sum of probabilities by: a nucleus is only taken as reached where it is by this."""


def sample_rows(
    op: GraphTape, sampler: Sampler, logits: ir.Value, root: ir.Value, depth: list[int], vocab_size: int
) -> ir.Value:
    """logits [B,R,V], the root's position [B], each row's depth below it -> [B,R] int64 tokens to follow the rows."""
    if sampler == "greedy":
        return op("ArgMax", logits, axis=-1, keepdims=0)
    return draw(op, weights(op, sampler, logits, len(depth), vocab_size), root, depth, "noise_offsets", vocab_size)


def weights(
    op: GraphTape, sampler: Sampler, logits: ir.Value, rows: int, vocab_size: int, *, normalized: bool = False
) -> ir.Value:
    """logits [B,R,V] -> [B,R,V]: the probability of every token, 0 for those that were removed.

    normalized: what is left adds up to one. Where nothing was removed, it is the plain sampler's to the last bit.
    """
    temperature = op("Max", _per_request(op, "temperature"), op.const(MIN_TEMPERATURE, F32))
    p = op("Softmax", op("Div", logits, temperature), axis=-1)
    if sampler == "sample":
        return p
    values = _candidates(op, p, rows, vocab_size)
    least = _least_kept(op, values, min(MAX_CANDIDATES, vocab_size))
    kept = op("Cast", op("GreaterOrEqual", p, least), to=int(ir.DataType.FLOAT))
    p = op("Mul", p, kept)  # a third of what Where costs
    if not normalized:
        return p
    some, total = op("Greater", least, op.const(0, F32)), op("ReduceSum", p, op.const([2]), keepdims=1)
    return op("Div", p, op("Where", some, total, op.const(1, F32)))


def draw(op: GraphTape, w: ir.Value, root: ir.Value, depth: list[int], offsets: str, vocab_size: int) -> ir.Value:
    """w [B,R,V], not negative, need not add up to one -> [B,R] tokens, with the noise that `offsets` names: a race of
    blocks, then one of the winner's members."""
    rows, blocks = len(depth), noise.vocabulary_blocks(vocab_size)
    if vocab_size < blocks * noise.MEMBERS:
        w = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * noise.MEMBERS - vocab_size]))
    by_block = op("Reshape", w, op.const([-1, rows, noise.MEMBERS, blocks]))
    exponential = _exponential(op, _table_sum(op, _offsets(op, root, depth, offsets), rows, vocab_size))
    of_blocks, of_members = (
        op("Slice", exponential, op.const([start]), op.const([start + count]), op.const([2]))
        for start, count in noise.race_entries(vocab_size)
    )
    mass = op("ReduceSum", by_block, op.const([2]), keepdims=0)
    mass = op("Where", is_noisy(op), mass, _first_members(op, by_block, blocks))
    winner = op("ArgMax", op("Div", mass, of_blocks), axis=2, keepdims=1)  # [B,R,1]
    every = op("Add", op("Unsqueeze", winner, op.const([3])), op.const(np.zeros((1, 1, noise.MEMBERS, 1))))
    members = op("Squeeze", op("GatherElements", by_block, every, axis=3), op.const([3]))  # [B,R,8]
    member = op("ArgMax", op("Div", members, of_members), axis=2, keepdims=1)
    token = op("Add", winner, op("Mul", member, op.const(blocks)))
    return op("Squeeze", token, op.const([2]))


def draw_among(
    op: GraphTape, sampler: Sampler, scores: ir.Value, blocks: ir.Value, root: ir.Value, depth: int, vocab_size: int
) -> ir.Value:
    """What `draw` takes where only some blocks have any weight: scores [B,8K] are the logits of the members of `blocks`
    [B,K], K = BLOCKS, first members first -> [B,1], an index into them. Noise is read for those blocks alone."""
    w = weights(op, sampler, op("Unsqueeze", scores, op.const([1])), 1, noise.MEMBERS * BLOCKS)
    by_block = op("Reshape", w, op.const([-1, noise.MEMBERS, BLOCKS]))
    listed = _offsets(op, root, [depth], "noise_offsets")  # [B,1,2]
    row = op("Div", blocks, op.const(noise.ROW))
    column = op("Sub", blocks, op("Mul", row, op.const(noise.ROW)))
    of_blocks, of_members = [], []
    for i, table in enumerate(_tables(op, vocab_size)):
        offset = op("Squeeze", op("Gather", listed, op.const([i]), axis=2), op.const([2]))  # [B,1]
        behind = op("Add", offset, op.const(1))  # the members' row
        rows = op("Gather", table, op("Add", row, behind), axis=0)  # [B,K,16]
        of_blocks.append(op("GatherElements", rows, op("Unsqueeze", column, op.const([2])), axis=2))  # [B,K,1]
        of_members.append(op("Gather", table, offset, axis=0))  # [B,1,16]
    axis, size = op.const([2]), op.const([noise.MEMBERS])
    mass = op("Unsqueeze", op("ReduceSum", by_block, op.const([1]), keepdims=0), axis)  # [B,K,1]
    winner = op("ArgMax", op("Div", mass, _exponential(op, op("Add", *of_blocks))), axis=1, keepdims=1)  # [B,1,1]
    every = op("Add", winner, op.const(np.zeros((1, noise.MEMBERS, 1))))
    members = op("Squeeze", op("GatherElements", by_block, every, axis=2), axis)  # [B,8]
    drawn = _exponential(op, op("Slice", op("Add", *of_members), op.const([0]), size, axis))  # [B,1,8]
    member = op("ArgMax", op("Div", members, op("Squeeze", drawn, op.const([1]))), axis=1, keepdims=1)
    return op("Add", op("Mul", member, op.const(BLOCKS)), op("Squeeze", winner, axis))


def _first_members(op: GraphTape, by_block: ir.Value, blocks: int) -> ir.Value:
    """[B,R,8,K] -> [B,R,K], the first row of the 8 that is not all 0.

    In a batch, a request of temperature 0 has no noise and equal weights where they are not 0: with this for the
    blocks' weights, the lowest id wins.
    """
    some = op("Greater", op("ReduceMax", by_block, op.const([3]), keepdims=1), op.const(0, F32))  # [B,R,8,1]
    first = op("ArgMax", op("Cast", some, to=int(ir.DataType.FLOAT)), axis=2, keepdims=1)  # [B,R,1,1]
    row = op("Add", first, op.const(np.zeros((1, 1, 1, blocks))))
    return op("Squeeze", op("GatherElements", by_block, row, axis=2), op.const([2]))


def uniform(op: GraphTape, root: ir.Value, depth: list[int], offsets: str, vocab_size: int) -> ir.Value:
    """[B,R,1]: a number in (0, 1) for the position behind each row."""
    listed = _offsets(op, root, depth, offsets)
    entries = []
    for i, table in enumerate(_tables(op, vocab_size)):
        block = op("Gather", listed, op.const([i]), axis=2)  # [B,R,1]
        entries.append(op("Gather", op("Reshape", table, op.const([-1])), op("Mul", block, op.const(noise.ROW))))
    return _uniform(op, op("Add", *entries))


def _candidates(op: GraphTape, p: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """The largest values of each row in falling order: [B,R,K], K = min(MAX_CANDIDATES, V). In rows where the first FEW
    settle what top-k and top-p keep, the others are 0.

    The search for the others runs all the same (CUDA graphs would not take a branch), but over numbers that are in
    order already, which costs a CPU a fifth: TopK then moves nothing.
    """
    k = min(MAX_CANDIDATES, vocab_size)
    if vocab_size <= 2 * noise.MEMBERS * k:
        return op.pair("TopK", p, op.const([k]), axis=-1)[0]
    best = _best_of_blocks(op, p, rows, vocab_size)
    few = _largest(op, p, best, rows, FEW, vocab_size)
    every = _largest(op, p, best, rows, k, vocab_size, op("Not", _settled(op, few)))
    others = op("Relu", op("Slice", every, op.const([FEW]), op.const([k]), op.const([2])))
    return op("Concat", few, others, axis=2)


def _settled(op: GraphTape, few: ir.Value) -> ir.Value:
    """[B,R,1] bool: whether top-k and top-p, where they are on, keep values of `few` [B,R,FEW] only, the largest."""
    top_k, top_p = _per_request(op, "top_k", np.int64), _per_request(op, "top_p")
    reached = op("Greater", op("ReduceSum", few, op.const([2]), keepdims=1), op("Add", top_p, op.const(SURELY, F32)))
    no_p = op("GreaterOrEqual", top_p, op.const(1, F32))
    by_p = op("And", op("Equal", top_k, op.const(0)), op("Or", no_p, reached))
    by_k = op("And", op("Greater", top_k, op.const(0)), op("LessOrEqual", top_k, op.const(FEW)))
    return op("Or", by_p, by_k)


def _best_of_blocks(op: GraphTape, p: ir.Value, rows: int, vocab_size: int) -> ir.Value | None:
    """[B,R,V] -> [B,R,V/8]: the largest value of each block of tokens; None where the last one has fewer."""
    size, blocks = noise.MEMBERS, noise.vocabulary_blocks(vocab_size)
    if vocab_size != size * blocks:
        return None
    return op("ReduceMax", op("Reshape", p, op.const([-1, rows, size, blocks])), op.const([2]), keepdims=0)


def _largest(
    op: GraphTape,
    p: ir.Value,
    best: ir.Value | None,
    rows: int,
    k: int,
    vocab_size: int,
    wanted: ir.Value | None = None,
) -> ir.Value:
    """[B,R,k]: the largest values of p [B,R,V] in falling order; negative numbers in rows not `wanted` [B,R,1] bool.

    A vocabulary is cut in two steps where it can be, since TopK over all of it is the slowest node of the graph: the k
    blocks of tokens with the `best` members hold the best k tokens.
    """
    if best is not None:
        blocks, members = noise.vocabulary_blocks(vocab_size), np.arange(noise.MEMBERS)[:, None]
        bests, chosen = op.pair("TopK", _or_falling(op, wanted, best, blocks), op.const([k]), axis=-1, sorted=0)
        ids = op("Add", op("Unsqueeze", chosen, op.const([2])), op.const(blocks * members))
        p = op("GatherElements", p, op("Reshape", ids, op.const([-1, rows, k * noise.MEMBERS])), axis=2)
        vocab_size = k * noise.MEMBERS
        if wanted is not None:  # k values are no less than the least of the best: out with the others
            wanted = op("And", wanted, op("GreaterOrEqual", p, op("ReduceMin", bests, op.const([2]), keepdims=1)))
    return op.pair("TopK", _or_falling(op, wanted, p, vocab_size), op.const([k]), axis=-1)[0]


def _or_falling(op: GraphTape, wanted: ir.Value | None, values: ir.Value, count: int) -> ir.Value:
    """[B,R,count]: `values` where they are wanted, elsewhere negative numbers in falling order."""
    return values if wanted is None else op("Where", wanted, values, op.const(-np.arange(1, count + 1), F32))


def _least_kept(op: GraphTape, values: ir.Value, candidates: int) -> ir.Value:
    """[B,R,1]: the least probability that top-k, then top-p, then min-p keep of `values` [B,R,K] in falling order;
    0 where all are off."""
    top_k, top_p = _per_request(op, "top_k", np.int64), _per_request(op, "top_p")
    no_k, no_p = op("Equal", top_k, op.const(0)), op("GreaterOrEqual", top_p, op.const(1, F32))
    rank, axis = op.const(np.arange(candidates).reshape(1, 1, -1)), op.const([2])
    in_top_k = op("Less", rank, op("Where", no_k, op.const(candidates), top_k))
    of_top_k = op("Where", in_top_k, values, op.const(0, F32))
    total = op("Where", no_k, op.const(1, F32), op("ReduceSum", of_top_k, axis, keepdims=1))
    before = op("CumSum", op("Div", of_top_k, total), op.const(2), exclusive=1)
    kept = op("And", in_top_k, op("Or", no_p, op("Less", before, top_p)))
    least = op("ReduceMin", op("Where", kept, values, op.const(2, F32)), axis, keepdims=1)
    least = op("Where", op("And", no_k, no_p), op.const(0, F32), least)
    largest = op("Slice", values, op.const([0]), op.const([1]), axis)
    return op("Max", least, op("Mul", _per_request(op, "min_p"), largest))


def is_noisy(op: GraphTape) -> ir.Value:
    """[B,1,1] bool: not of temperature 0."""
    return op("Greater", _per_request(op, "temperature"), op.const(0, F32))


def _per_request(op: GraphTape, name: str, dtype: type = np.float32) -> ir.Value:
    """A [B] input as [B,1,1]."""
    return op("Unsqueeze", op.input(name, dtype, ["batch"]), op.const([1, 2]))


def _offsets(op: GraphTape, root: ir.Value, depth: list[int], name: str) -> ir.Value:
    """[B,R,2]: the offsets of the position each row predicts, `root + depth + 1`, out of the request's list."""
    listed = op.input(name, np.int64, ["batch", "positions", 2])
    position = op("Add", op("Unsqueeze", root, op.const([1])), op.const([[d + 1 for d in depth]]))  # [B,R]
    pairs = op("Concat", *[op("Unsqueeze", position, op.const([2]))] * 2, axis=2)
    return op("GatherElements", listed, pairs, axis=1)


def _tables(op: GraphTape, vocab_size: int) -> list[ir.Value]:
    """[blocks,16] int32 each, stored once for all tails of a bundle."""
    tables = noise.noise_tables(vocab_size)
    return [op.const(table, np.int32, name) for name, table in zip(noise.TABLES, tables, strict=True)]


def _table_sum(op: GraphTape, offsets: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """T1[16b + i] + T2[16d + i] for every number i of a race: [B,R,I] int32, read 16 at a time."""
    count = noise.race_rows(vocab_size)
    parts = []
    for i, table in enumerate(_tables(op, vocab_size)):
        offset = op("Gather", offsets, op.const([i]), axis=2)  # [B,R,1]
        parts.append(op("Gather", table, op("Add", op.const(np.arange(count)), offset), axis=0))  # [B,R,count,16]
    return op("Reshape", op("Add", *parts), op.const([-1, rows, count * noise.ROW]))


def _uniform(op: GraphTape, total: ir.Value) -> ir.Value:
    """int32 table sums (below 2^31, so they never overflow) -> u in (0, 1), float32."""
    modulus = op.const(1 << noise.BITS, np.int32)
    x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
    scale = op("Where", is_noisy(op), op.const(noise.SCALE, F32), op.const(0, F32))
    return op("Add", op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale), op.const(0.5 * noise.SCALE, F32))


def _exponential(op: GraphTape, total: ir.Value) -> ir.Value:
    """int32 table sums -> E = -log(1 - u), float32."""
    u = _uniform(op, total)
    one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(1 / 3, F32)
    series = op("Mul", u, op("Add", one, op("Mul", u, op("Add", half, op("Mul", u, third)))))
    exact = op("Neg", op("Log", op("Sub", one, u)))
    return op("Where", op("Less", u, op.const(noise.SERIES_BELOW, F32)), series, exact)
