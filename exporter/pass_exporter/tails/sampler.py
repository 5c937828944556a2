"""Truncation and sampling of `pass_runtime.bundle.reference` as ONNX operators.

It uses only operators that TensorRT-RTX supports: no modulo, no bitwise operators, no 64-bit unsigned integers.
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

    B is the batch size, R the number of rows, V the vocabulary size, K the number of blocks of tokens.
    """

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    @cached_property
    def noise(self) -> NoiseNodes:
        return NoiseNodes(self.op, self.vocab_size)

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

    def draw(self, w: ir.Value, noise_of: RowNoise, rows: int) -> ir.Value:
        """w [B,R,V], non-negative and unnormalized -> [B,R] tokens.

        Draws a block of tokens, then one of its tokens, by exponential sampling (`pass_runtime.bundle.noise`). At
        temperature 0, of tied tokens the one with the lowest id must win, so there it is the ArgMax of `w`.
        """
        op, size, blocks = self.op, noise.BLOCK_SIZE, noise.vocabulary_blocks(self.vocab_size)
        padded = w
        if self.vocab_size < blocks * size:
            padded = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * size - self.vocab_size]))
        drawn = self._race(padded, noise_of, rows, blocks)
        likeliest = op("ArgMax", w, axis=2, keepdims=1)
        return op("Squeeze", op("Where", self.is_noisy(), drawn, likeliest), op.const([2]))

    def draw_candidate(self, scores: ir.Value, noise_of: RowNoise) -> ir.Value:
        """Draws the token that `draw` would draw if all tokens outside K candidate blocks had probability 0.

        scores [B,1,8K]: the logits of the blocks' tokens: the first token of every block, then the second of every
        block, and so on. noise_of: that of the K blocks. Returns [B,1,1], an index into `scores`.
        """
        return self._race(self._candidate_weights(scores, 1), noise_of, 1, CANDIDATE_BLOCKS)

    def rank_candidates(self, scores: ir.Value, rows: int, noise_of: RowNoise) -> ir.Value:
        """scores [B,rows,8K], each row as in `draw_candidate` -> [B,rows,8K] keys that rank the candidates.

        The candidate with the largest key is the one that `draw_candidate` draws. A key is the block's times the
        token's, divided by the largest of the block's tokens; at temperature 0 it is the score.
        noise_of: blocks [B,1,K], tokens [B,1,8], for all rows.
        """
        op = self.op
        shape = op.const([-1, rows, noise.BLOCK_SIZE, CANDIDATE_BLOCKS])
        by_block = op("Reshape", self._candidate_weights(scores, rows), shape)
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=1)
        of_blocks = op("Div", mass, op("Neg", op("Unsqueeze", noise_of.blocks, op.const([1]))))  # [B,rows,1,K]
        of_tokens = op("Div", by_block, op("Neg", op("Unsqueeze", noise_of.tokens, op.const([3]))))
        first = op("Max", op("ReduceMax", of_tokens, op.const([2]), keepdims=1), op.const(MIN_POSITIVE, F32))
        relative = op("Div", of_tokens, first)  # 1 for the first token of a block
        combined = op("Mul", of_blocks, relative)
        flat = op("Reshape", combined, op.const([0, rows, noise.BLOCK_SIZE * CANDIDATE_BLOCKS]))
        return op("Where", self.is_noisy(), flat, scores)

    def is_noisy(self) -> ir.Value:
        """[B,1,1] bool: whether the request's temperature is above 0."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _race(self, w: ir.Value, noise_of: RowNoise, rows: int, blocks: int) -> ir.Value:
        """w [B,R,8K] -> [B,R,1]: the index of the token that is drawn. blocks: K.

        Weights are divided by -E, so the least quotient wins: first that of a block, then that of one of its tokens.
        """
        op, size = self.op, noise.BLOCK_SIZE
        mass = op("ReduceSum", op("Reshape", w, op.const([-1, rows, size, blocks])), op.const([2]), keepdims=0)
        block = op("ArgMin", op("Div", mass, noise_of.blocks), axis=2, keepdims=1)  # [B,R,1]
        tokens = op("Add", block, op.const(blocks * np.arange(size)))  # [B,R,8]
        quotients = op("Div", op("GatherElements", w, tokens, axis=2), noise_of.tokens)
        return op("GatherElements", tokens, op("ArgMin", quotients, axis=2, keepdims=1), axis=2)

    def _candidate_weights(self, scores: ir.Value, rows: int) -> ir.Value:
        """scores [B,rows,8K] -> the candidates' probabilities [B,rows,8K]."""
        return SamplerNodes(self.op, self.sampler, noise.BLOCK_SIZE * CANDIDATE_BLOCKS).weights(scores, rows)
