"""The sampler of `pass_runtime.sampling` as ONNX operators, for the tail graphs.

Only operators that TensorRT-RTX takes: no modulo chains, no bitwise operators, TopK with a constant k.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from pass_exporter.tape import GraphTape
from pass_runtime import noise
from pass_runtime.sampling import MAX_CANDIDATES, MIN_TEMPERATURE, Sampler

F32 = np.float32
GROUP = 8
"""Tokens in a group of the two-step cut to the candidates."""


def sample_rows(
    op: GraphTape, sampler: Sampler, logits: ir.Value, root: ir.Value, depth: list[int], vocab_size: int
) -> ir.Value:
    """logits [B,R,V], the root's position [B], each row's depth below it -> [B,R] int64 tokens to follow the rows."""
    if sampler == "greedy":
        return op("ArgMax", logits, axis=-1, keepdims=0)
    temperature = op("Max", _per_request(op, "temperature"), op.const(MIN_TEMPERATURE, F32))
    scaled = op("Div", logits, temperature)
    rows, offsets = len(depth), _offsets(op, root, depth)
    if sampler == "sample":
        drawn = _vocabulary_table_sum(op, offsets, rows, vocab_size)
        return op("ArgMax", _race(op, scaled, _exponential(op, drawn)), axis=-1, keepdims=0)
    values, ids = _candidates(op, scaled, rows, vocab_size)
    drawn = _candidate_table_sum(op, ids, offsets, vocab_size)
    kept = _kept(op, values, scaled, min(MAX_CANDIDATES, vocab_size))
    race = op("Where", kept, _race(op, values, _exponential(op, drawn)), op.const(-1, F32))
    winner = op("ArgMax", race, axis=-1, keepdims=1)
    return op("Squeeze", op("GatherElements", ids, winner, axis=2), op.const([2]))


def probabilities(op: GraphTape, sampler: Sampler, logits: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """logits [B,R,V] -> [B,R,V]: what `sample_rows` draws from, normalized (for the rejection rule)."""
    temperature = op("Max", _per_request(op, "temperature"), op.const(MIN_TEMPERATURE, F32))
    scaled = op("Div", logits, temperature)
    if sampler == "sample":
        return op("Softmax", scaled, axis=-1)
    values, ids = _candidates(op, scaled, rows, vocab_size)
    kept = _kept(op, values, scaled, min(MAX_CANDIDATES, vocab_size))
    best = op("Gather", values, op.const([0]), axis=2)
    weight = op("Where", kept, op("Exp", op("Sub", values, best)), op.const(0, F32))
    share = op("Div", weight, op("ReduceSum", weight, op.const([2]), keepdims=1))
    return op("ScatterElements", op("Mul", logits, op.const(0, F32)), ids, share, axis=2)


def draw(op: GraphTape, weights: ir.Value, root: ir.Value, depth: list[int], offsets: str, vocab_size: int) -> ir.Value:
    """weights [B,R,V], not negative, need not add up to one -> [B,R] tokens, with the noise that `offsets` names."""
    drawn = _vocabulary_table_sum(op, _offsets(op, root, depth, offsets), len(depth), vocab_size)
    return op("ArgMax", op("Div", weights, _exponential(op, drawn)), axis=-1, keepdims=0)


def uniform(op: GraphTape, root: ir.Value, depth: list[int], offsets: str, vocab_size: int) -> ir.Value:
    """[B,R,1]: a number in (0, 1) for the position behind each row."""
    listed = _offsets(op, root, depth, offsets)
    entries = []
    for i, table in enumerate(_tables(op, vocab_size)):
        block = op("Gather", listed, op.const([i]), axis=2)  # [B,R,1]
        entries.append(op("Gather", op("Reshape", table, op.const([-1])), op("Mul", block, op.const(noise.BLOCK))))
    return _uniform(op, op("Add", *entries))


def _race(op: GraphTape, scaled: ir.Value, exponential: ir.Value) -> ir.Value:
    """p_i / E_i up to a factor of its row: the largest wins.

    Tokens so unlikely that exp underflows (below e^-87 of the best) could not win: E spans less than e^25.
    """
    best = op("ReduceMax", scaled, op.const([2]), keepdims=1)
    return op("Div", op("Exp", op("Sub", scaled, best)), exponential)


def _candidates(op: GraphTape, scaled: ir.Value, rows: int, vocab_size: int) -> tuple[ir.Value, ir.Value]:
    """The most likely tokens of each row in falling order: values and ids [B,R,K], K = min(MAX_CANDIDATES, V).

    A large vocabulary is cut in two steps, since TopK over all of it is the slowest node of the graph: the best K
    groups of tokens, by their best member, hold the best K tokens.
    """
    k = min(MAX_CANDIDATES, vocab_size)
    if vocab_size % GROUP or vocab_size <= 2 * GROUP * k:
        return op.pair("TopK", scaled, op.const([k]), axis=-1)
    groups = vocab_size // GROUP  # group g holds the ids g, g + groups, g + 2 groups, ...
    best = op("ReduceMax", op("Reshape", scaled, op.const([-1, rows, GROUP, groups])), op.const([2]), keepdims=0)
    _, chosen = op.pair("TopK", best, op.const([k]), axis=-1)
    members = op("Add", op("Unsqueeze", chosen, op.const([2])), op.const(groups * np.arange(GROUP)[:, None]))
    ids = op("Reshape", members, op.const([-1, rows, GROUP * k]))
    values, order = op.pair("TopK", op("GatherElements", scaled, ids, axis=2), op.const([k]), axis=-1)
    return values, op("GatherElements", ids, order, axis=2)


def _per_request(op: GraphTape, name: str, dtype: type = np.float32) -> ir.Value:
    """A [B] input as [B,1,1]."""
    return op("Unsqueeze", op.input(name, dtype, ["batch"]), op.const([1, 2]))


def _offsets(op: GraphTape, root: ir.Value, depth: list[int], name: str = "noise_offsets") -> ir.Value:
    """[B,R,2]: the offsets of the position each row predicts, `root + depth + 1`, out of the request's list."""
    listed = op.input(name, np.int64, ["batch", "positions", 2])
    position = op("Add", op("Unsqueeze", root, op.const([1])), op.const([[d + 1 for d in depth]]))  # [B,R]
    pairs = op("Concat", *[op("Unsqueeze", position, op.const([2]))] * 2, axis=2)
    return op("GatherElements", listed, pairs, axis=1)


def _tables(op: GraphTape, vocab_size: int) -> list[ir.Value]:
    """[blocks,16] int32 each, stored once for all tails of a bundle."""
    tables = noise.noise_tables(vocab_size)
    return [op.const(table, np.int32, f"noise_table_{i + 1}") for i, table in enumerate(tables)]


def _vocabulary_table_sum(op: GraphTape, offsets: ir.Value, rows: int, vocab_size: int) -> ir.Value:
    """T1[16b + i] + T2[16d + i] for every token i: [B,R,V] int32, read block by block."""
    blocks = noise.vocabulary_blocks(vocab_size)
    block = op.const(np.arange(blocks))
    parts = []
    for i, table in enumerate(_tables(op, vocab_size)):
        offset = op("Gather", offsets, op.const([i]), axis=2)  # [B,R,1]
        parts.append(op("Gather", table, op("Add", block, offset), axis=0))  # [B,R,blocks,16]
    total = op("Reshape", op("Add", *parts), op.const([-1, rows, blocks * noise.BLOCK]))
    if vocab_size == blocks * noise.BLOCK:
        return total
    return op("Slice", total, op.const([0]), op.const([vocab_size]), op.const([2]))


def _candidate_table_sum(op: GraphTape, ids: ir.Value, offsets: ir.Value, vocab_size: int) -> ir.Value:
    """T1[16b + i] + T2[16d + i] for the tokens `ids` [B,R,K]: [B,R,K] int32."""
    parts = []
    for i, table in enumerate(_tables(op, vocab_size)):
        offset = op("Mul", op("Gather", offsets, op.const([i]), axis=2), op.const(noise.BLOCK))
        flat = op("Reshape", table, op.const([-1]))
        parts.append(op("Gather", flat, op("Add", ids, offset), axis=0))
    return op("Add", *parts)


def _uniform(op: GraphTape, total: ir.Value) -> ir.Value:
    """int32 table sums (below 2^31, so they never overflow) -> u in (0, 1), float32."""
    modulus = op.const(1 << noise.BITS, np.int32)
    x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
    # In a batch, a request of temperature 0 has no noise: all its u are equal, and the lower id wins a tie.
    noisy = op("Greater", _per_request(op, "temperature"), op.const(0, F32))
    scale = op("Where", noisy, op.const(noise.SCALE, F32), op.const(0, F32))
    return op("Add", op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale), op.const(0.5 * noise.SCALE, F32))


def _exponential(op: GraphTape, total: ir.Value) -> ir.Value:
    """int32 table sums -> E = -log(1 - u), float32."""
    u = _uniform(op, total)
    one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(1 / 3, F32)
    series = op("Mul", u, op("Add", one, op("Mul", u, op("Add", half, op("Mul", u, third)))))
    exact = op("Neg", op("Log", op("Sub", one, u)))
    return op("Where", op("Less", u, op.const(noise.SERIES_BELOW, F32)), series, exact)


def _kept(op: GraphTape, values: ir.Value, scaled: ir.Value, candidates: int) -> ir.Value:
    """[B,R,K] bool: top-k, then top-p, over `values` [B,R,K] in falling order."""
    top_k = _per_request(op, "top_k", np.int64)
    off = op("Equal", top_k, op.const(0))
    rank = op.const(np.arange(candidates).reshape(1, 1, -1))
    in_top_k = op("Less", rank, op("Where", off, op.const(candidates), top_k))
    top = op("Gather", values, op.const([0]), axis=2)
    weight = op("Where", in_top_k, op("Exp", op("Sub", values, top)), op.const(0, F32))
    axis = op.const([2])
    whole = op("ReduceSum", op("Exp", op("Sub", scaled, top)), axis, keepdims=1)  # the vocabulary, with top-k off
    total = op("Where", off, whole, op("ReduceSum", weight, axis, keepdims=1))
    probability = op("Div", weight, total)
    before = op("CumSum", probability, op.const(2), exclusive=1)
    return op("And", in_top_k, op("Less", before, _per_request(op, "top_p")))
