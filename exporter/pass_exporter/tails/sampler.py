"""Truncation and sampling of `pass_runtime.bundle.reference` as ONNX operators.

It uses only operators that TensorRT-RTX supports: no modulo, no bitwise operators, no 64-bit
unsigned integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.noise_nodes import NoiseNodes, RowNoise
from pass_exporter.tails.tape import GraphTape
from pass_exporter.tails.truncation import largest_probabilities, smallest_kept
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS
from pass_runtime.bundle.request_fields import MAX_CANDIDATES
from pass_runtime.bundle.sampling import MIN_TEMPERATURE, Sampler

F32 = np.float32
MIN_POSITIVE = float(np.finfo(F32).tiny)


@dataclass(frozen=True)
class SamplerNodes:
    """Adds the nodes of one sampler to a graph.

    B is the batch size, R the number of rows, V the vocabulary size, K the number of blocks of
    tokens.
    """

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    @cached_property
    def noise(self) -> NoiseNodes:
        return NoiseNodes(self.op, self.vocab_size)

    def weights(self, logits: ir.Value, rows: int, *, normalized: bool = False) -> ir.Value:
        """logits [B,R,V] -> [B,R,V]: the probability of every token, 0 for truncated ones.

        normalized: whether the remaining probabilities are scaled to sum to 1. If nothing is
        removed, the result equals that without truncation to the last bit.
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
        truncated = op("Greater", smallest, op.const(0, F32))
        total = op("ReduceSum", p, op.const([2]), keepdims=1)
        return op("Div", p, op("Where", truncated, total, op.const(1, F32)))

    def draw(self, w: ir.Value, noise_of: RowNoise, rows: int) -> ir.Value:
        """w [B,R,V], non-negative and unnormalized -> [B,R] tokens.

        Draws a block of tokens, then one of its tokens, by exponential sampling
        (`pass_runtime.bundle.noise`). At temperature 0, of tied tokens the one with the lowest id
        must win. Token i of block k of K has the id i*K + k, so there a block counts as much as its
        best token, halved i times. An ArgMax over all tokens takes a CPU longer.
        """
        op, size, blocks = self.op, noise.BLOCK_SIZE, noise.vocabulary_blocks(self.vocab_size)
        if self.vocab_size < blocks * size:
            w = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * size - self.vocab_size]))
        by_block, axis = op("Reshape", w, op.const([-1, rows, size, blocks])), op.const([2])
        halved = op("Mul", by_block, op.const(0.5 ** np.arange(size).reshape(1, 1, -1, 1), F32))
        mass = op("ReduceSum", by_block, axis, keepdims=0)
        best = op("ReduceMax", halved, axis, keepdims=0)
        drawn = self._race(op("Where", self.is_noisy(), mass, best), w, noise_of, blocks)
        return op("Squeeze", drawn, axis)

    def draw_candidate(self, scores: ir.Value, noise_of: RowNoise) -> ir.Value:
        """Draw as `draw` would if all tokens outside K candidate blocks had probability 0.

        scores [B,1,8K]: the logits of the blocks' tokens: the first token of every block, then the
        second of every block, and so on. noise_of: that of the K blocks. Returns [B,1,1], an index
        into `scores`.
        """
        w, by_block = self._candidate_weights(scores, 1)
        mass = self.op("ReduceSum", by_block, self.op.const([2]), keepdims=0)
        return self._race(mass, w, noise_of, CANDIDATE_BLOCKS)

    def rank_candidates(self, scores: ir.Value, rows: int, noise_of: RowNoise) -> ir.Value:
        """scores [B,rows,8K], each row as in `draw_candidate` -> keys [B,rows,8K] that rank them.

        The candidate with the largest key is the one that `draw_candidate` draws. A key is the
        block's times the token's, divided by the largest of the block's tokens; at temperature 0 it
        is the score.
        noise_of: blocks [B,1,K], tokens [B,1,8], for all rows.
        """
        op = self.op
        _, by_block = self._candidate_weights(scores, rows)
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=1)
        # [B,rows,1,K]
        of_blocks = op("Div", mass, op("Neg", op("Unsqueeze", noise_of.blocks, op.const([1]))))
        of_tokens = op("Div", by_block, op("Neg", op("Unsqueeze", noise_of.tokens, op.const([3]))))
        first = op(
            "Max",
            op("ReduceMax", of_tokens, op.const([2]), keepdims=1),
            op.const(MIN_POSITIVE, F32),
        )
        relative = op("Div", of_tokens, first)  # 1 for the first token of a block
        combined = op("Mul", of_blocks, relative)
        flat = op("Reshape", combined, op.const([0, rows, noise.BLOCK_SIZE * CANDIDATE_BLOCKS]))
        return op("Where", self.is_noisy(), flat, scores)

    def is_noisy(self) -> ir.Value:
        """[B,1,1] bool: whether the request's temperature is above 0."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _race(self, mass: ir.Value, w: ir.Value, noise_of: RowNoise, blocks: int) -> ir.Value:
        """mass [B,R,K] of the K = `blocks` blocks, w [B,R,8K] -> [B,R,1]: the drawn token's index.

        Weights are divided by -E, so the least quotient wins: first that of a block, then that of
        one of its tokens.
        """
        op = self.op
        block = op("ArgMin", op("Div", mass, noise_of.blocks), axis=2, keepdims=1)  # [B,R,1]
        tokens = op("Add", block, op.const(blocks * np.arange(noise.BLOCK_SIZE)))  # [B,R,8]
        quotients = op("Div", op("GatherElements", w, tokens, axis=2), noise_of.tokens)
        return op("GatherElements", tokens, op("ArgMin", quotients, axis=2, keepdims=1), axis=2)

    def _candidate_weights(self, scores: ir.Value, rows: int) -> tuple[ir.Value, ir.Value]:
        """scores [B,rows,8K] -> probabilities [B,rows,8K], and these by block [B,rows,8,K]."""
        w = SamplerNodes(self.op, self.sampler, noise.BLOCK_SIZE * CANDIDATE_BLOCKS).weights(
            scores, rows
        )
        return w, self.op(
            "Reshape", w, self.op.const([-1, rows, noise.BLOCK_SIZE, CANDIDATE_BLOCKS])
        )
