"""The sampler of `pass_runtime.bundle.reference` as ONNX operators, for the tail graphs.

It uses only operators that TensorRT-RTX supports: no modulo, no bitwise operators, and TopK with a constant k only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_exporter.tails.truncation import largest_probabilities, smallest_kept
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS
from pass_runtime.bundle.request_fields import MAX_CANDIDATES
from pass_runtime.bundle.sampling import MIN_TEMPERATURE, Sampler

F32 = np.float32
MIN_POSITIVE = float(np.finfo(F32).tiny)


@dataclass(frozen=True)
class RaceKeys:
    """Keys of exponential sampling: weights divided by exponential noise. The block or token with the largest is drawn.

    blocks [B,R,1,K]: the keys of K blocks. tokens [B,R,8,K]: the keys of the 8 tokens of each block.
    """

    blocks: ir.Value
    tokens: ir.Value


@dataclass(frozen=True)
class SamplerNodes:
    """Adds the nodes of one sampler to a graph.

    B is the batch size, R the number of rows, V the vocabulary size. The token that is drawn in a row gets the position
    `root + depth + 1`: `root` [B] int64 is the position of the window's root, and `depth` has one entry per row.
    """

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    def sample(self, logits: ir.Value, root: ir.Value, depth: list[int]) -> ir.Value:
        """logits [B,R,V] -> [B,R] int64: the token that follows each row."""
        if self.sampler == "greedy":
            return self.op("ArgMax", logits, axis=-1, keepdims=0)
        return self.draw(self.weights(logits, len(depth)), root, depth, "noise_offsets")

    def weights(self, logits: ir.Value, rows: int, *, normalized: bool = False) -> ir.Value:
        """logits [B,R,V] -> [B,R,V]: the probability of every token, 0 for tokens that truncation removes.

        normalized: whether the remaining probabilities are scaled to sum to 1. If nothing is removed, the result equals
        that without truncation to the last bit.
        """
        op = self.op
        temperature = op("Max", op.per_request("temperature"), op.const(MIN_TEMPERATURE, F32))
        p = op("Softmax", op("Div", logits, temperature), axis=-1)
        if self.sampler == "sample":
            return p
        values = largest_probabilities(op, p, rows, self.vocab_size)
        smallest = smallest_kept(op, values, min(MAX_CANDIDATES, self.vocab_size))
        kept = op("Cast", op("GreaterOrEqual", p, smallest), to=int(ir.DataType.FLOAT))
        p = op("Mul", p, kept)  # This takes a third of the time of a Where.
        if not normalized:
            return p
        truncated, total = op("Greater", smallest, op.const(0, F32)), op("ReduceSum", p, op.const([2]), keepdims=1)
        return op("Div", p, op("Where", truncated, total, op.const(1, F32)))

    def draw(self, w: ir.Value, root: ir.Value, depth: list[int], stream: str) -> ir.Value:
        """w [B,R,V], non-negative and unnormalized -> [B,R] tokens drawn with the noise of `stream`.

        Draws a block of tokens, then one of its tokens, by exponential sampling (`pass_runtime.bundle.noise`).
        """
        op, rows, blocks = self.op, len(depth), noise.vocabulary_blocks(self.vocab_size)
        if self.vocab_size < blocks * noise.BLOCK_SIZE:
            w = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * noise.BLOCK_SIZE - self.vocab_size]))
        by_block = op("Reshape", w, op.const([-1, rows, noise.BLOCK_SIZE, blocks]))
        exponential = self._exponential(self._table_sum(self._offsets(root, depth, stream), rows))
        block_noise, token_noise = (
            op("Slice", exponential, op.const([start]), op.const([start + count]), op.const([2]))
            for start, count in noise.entries_per_position(self.vocab_size)
        )
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=0)
        mass = op("Where", self.is_noisy(), mass, self._first_nonzero_tokens(by_block, blocks))
        block = op("ArgMax", op("Div", mass, block_noise), axis=2, keepdims=1)  # [B,R,1]
        every = op("Add", op("Unsqueeze", block, op.const([3])), op.const(np.zeros((1, 1, noise.BLOCK_SIZE, 1))))
        tokens = op("Squeeze", op("GatherElements", by_block, every, axis=3), op.const([3]))  # [B,R,8]
        token = op("ArgMax", op("Div", tokens, token_noise), axis=2, keepdims=1)
        token = op("Add", block, op("Mul", token, op.const(blocks)))
        return op("Squeeze", token, op.const([2]))

    def draw_candidate(self, scores: ir.Value, blocks: ir.Value, root: ir.Value, depth: int) -> ir.Value:
        """Draws the token that `sample` would draw if all tokens outside `blocks` had probability 0.

        scores [B,8K]: the logits of the tokens of `blocks` [B,K], K = CANDIDATE_BLOCKS: the first token of every block,
        then the second of every block, and so on. Returns [B,1], an index into `scores`.
        """
        op, axis = self.op, self.op.const([2])
        keys = self._candidate_races(op("Unsqueeze", scores, op.const([1])), 1, blocks, root, depth)
        block = op("ArgMax", keys.blocks, axis=3, keepdims=1)  # [B,1,1,1]
        every = op("Add", block, op.const(np.zeros((1, 1, noise.BLOCK_SIZE, 1))))
        tokens = op("GatherElements", keys.tokens, every, axis=3)  # [B,1,8,1]
        token = op("ArgMax", tokens, axis=2, keepdims=1)
        index = op("Add", op("Mul", token, op.const(CANDIDATE_BLOCKS)), block)
        return op("Squeeze", op("Squeeze", index, op.const([3])), axis)

    def rank_candidates(self, scores: ir.Value, rows: int, blocks: ir.Value, root: ir.Value, depth: int) -> ir.Value:
        """scores [B,rows,8K], each row as in `draw_candidate` -> [B,rows,8K] keys that rank the candidates.

        The candidate with the largest key is the one that `draw_candidate` draws. A key is the block's times the
        token's, divided by the largest of the block's tokens; at temperature 0, and if greedy, it is the score.
        """
        op = self.op
        if self.sampler == "greedy":
            return scores
        keys = self._candidate_races(scores, rows, blocks, root, depth)
        first = op("Max", op("ReduceMax", keys.tokens, op.const([2]), keepdims=1), op.const(MIN_POSITIVE, F32))
        relative = op("Div", keys.tokens, first)  # 1 for the first token of a block
        combined = op("Mul", keys.blocks, relative)
        flat = op("Reshape", combined, op.const([0, rows, noise.BLOCK_SIZE * CANDIDATE_BLOCKS]))
        return op("Where", self.is_noisy(), flat, scores)

    def _candidate_races(self, scores: ir.Value, rows: int, blocks: ir.Value, root: ir.Value, depth: int) -> RaceKeys:
        """The keys of `blocks` [B,K] and of their tokens, for scores [B,rows,8K] as in `draw_candidate`."""
        op = self.op
        candidates = SamplerNodes(op, self.sampler, noise.BLOCK_SIZE * CANDIDATE_BLOCKS)
        w = candidates.weights(scores, rows)
        by_block = op("Reshape", w, op.const([-1, rows, noise.BLOCK_SIZE, CANDIDATE_BLOCKS]))
        listed = self._offsets(root, [depth], "noise_offsets")  # [B,1,2]
        row = op("Div", blocks, op.const(noise.ROW_SIZE))
        column = op("Sub", blocks, op("Mul", row, op.const(noise.ROW_SIZE)))
        of_blocks, of_tokens = [], []
        for i, table in enumerate(self._tables()):
            offset = op("Squeeze", op("Gather", listed, op.const([i]), axis=2), op.const([2]))  # [B,1]
            after_tokens = op("Add", offset, op.const(1))  # The first row holds the noise of a block's tokens.
            entries = op("Gather", table, op("Add", row, after_tokens), axis=0)  # [B,K,16]
            of_blocks.append(op("GatherElements", entries, op("Unsqueeze", column, op.const([2])), axis=2))  # [B,K,1]
            of_tokens.append(op("Gather", table, offset, axis=0))  # [B,1,16]
        block_noise = self._exponential(op("Add", *of_blocks))  # [B,K,1]
        block_noise = op("Reshape", block_noise, op.const([0, 1, 1, CANDIDATE_BLOCKS]))
        size, axis = op.const([noise.BLOCK_SIZE]), op.const([2])
        token_noise = self._exponential(op("Slice", op("Add", *of_tokens), op.const([0]), size, axis))  # [B,1,8]
        mass = op("ReduceSum", by_block, axis, keepdims=1)
        return RaceKeys(op("Div", mass, block_noise), op("Div", by_block, op("Unsqueeze", token_noise, op.const([3]))))

    def uniform(self, root: ir.Value, depth: list[int], stream: str) -> ir.Value:
        """[B,R,1] float32: a uniform random number in (0, 1) for the token that follows each row."""
        op, listed = self.op, self._offsets(root, depth, stream)
        entries = []
        for i, table in enumerate(self._tables()):
            offset = op("Gather", listed, op.const([i]), axis=2)  # [B,R,1]
            entries.append(
                op("Gather", op("Reshape", table, op.const([-1])), op("Mul", offset, op.const(noise.ROW_SIZE)))
            )
        return self._uniform(op("Add", *entries))

    def is_noisy(self) -> ir.Value:
        """[B,1,1] bool: whether the request's temperature is above 0."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _first_nonzero_tokens(self, by_block: ir.Value, blocks: int) -> ir.Value:
        """by_block [B,R,8,K] -> [B,R,K]: the first of the 8 vectors that is not all 0.

        It replaces the blocks' sums at temperature 0, so without noise: of tied tokens the one with the lowest id must
        win, and token i of block k has the id i*K + k.
        """
        op = self.op
        some = op("Greater", op("ReduceMax", by_block, op.const([3]), keepdims=1), op.const(0, F32))  # [B,R,8,1]
        first = op("ArgMax", op("Cast", some, to=int(ir.DataType.FLOAT)), axis=2, keepdims=1)  # [B,R,1,1]
        row = op("Add", first, op.const(np.zeros((1, 1, 1, blocks))))
        return op("Squeeze", op("GatherElements", by_block, row, axis=2), op.const([2]))

    def _offsets(self, root: ir.Value, depth: list[int], stream: str) -> ir.Value:
        """[B,R,2]: the noise table offsets of the position `root + depth + 1` of each row's token."""
        op = self.op
        listed = op.input(stream, np.int64, ["batch", "positions", 2])
        position = op("Add", op("Unsqueeze", root, op.const([1])), op.const([[d + 1 for d in depth]]))  # [B,R]
        pairs = op("Concat", *[op("Unsqueeze", position, op.const([2]))] * 2, axis=2)
        return op("GatherElements", listed, pairs, axis=1)

    def _tables(self) -> list[ir.Value]:
        """The two noise tables [rows,16] int32, which all tails of a bundle share."""
        tables = noise.noise_tables(self.vocab_size)
        return [self.op.const(table, np.int32, name) for name, table in zip(noise.TABLES, tables, strict=True)]

    def _table_sum(self, offsets: ir.Value, rows: int) -> ir.Value:
        """[B,R,I] int32: T1[16b + i] + T2[16d + i] for i = 0 .. I-1, with the offsets (b, d) of each row's position.

        It gathers whole table rows of 16.
        """
        op, count = self.op, noise.rows_per_position(self.vocab_size)
        parts = []
        for i, table in enumerate(self._tables()):
            offset = op("Gather", offsets, op.const([i]), axis=2)  # [B,R,1]
            parts.append(op("Gather", table, op("Add", op.const(np.arange(count)), offset), axis=0))  # [B,R,count,16]
        return op("Reshape", op("Add", *parts), op.const([-1, rows, count * noise.ROW_SIZE]))

    def _uniform(self, total: ir.Value) -> ir.Value:
        """Table sums, int32 without overflow -> uniform numbers u in (0, 1), float32; at temperature 0 all the same."""
        op = self.op
        modulus = op.const(1 << noise.BITS, np.int32)
        x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
        scale = op("Where", self.is_noisy(), op.const(noise.SCALE, F32), op.const(0, F32))
        return op("Add", op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale), op.const(0.5 * noise.SCALE, F32))

    def _exponential(self, total: ir.Value) -> ir.Value:
        """Table sums, int32 -> exponential noise E = -log(1 - u), float32."""
        op, u = self.op, self._uniform(total)
        one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(1 / 3, F32)
        series = op("Mul", u, op("Add", one, op("Mul", u, op("Add", half, op("Mul", u, third)))))
        exact = op("Neg", op("Log", op("Sub", one, u)))
        return op("Where", op("Less", u, op.const(noise.SERIES_LIMIT, F32)), series, exact)
