"""`pass_runtime.bundle.reference` as ONNX operators that TensorRT-RTX has: no modulo, bitwise
operators or 64-bit unsigned integers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.noise import NoiseNodes, RowNoise
from pass_exporter.tails.tape import GraphTape
from pass_exporter.tails.truncation import largest_probabilities, smallest_kept
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS
from pass_runtime.bundle.sampling import MAX_CANDIDATES, MIN_TEMPERATURE, Sampler

F32 = np.float32
MIN_POSITIVE = float(np.finfo(F32).tiny)


@dataclass(frozen=True)
class SamplerNodes:
    """R: rows, K: blocks of 8 token ids to draw from."""

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    @cached_property
    def noise(self) -> NoiseNodes:
        return NoiseNodes(self.op, self.vocab_size)

    def weights(self, logits: ir.Value, rows: int, *, normalized: bool = False) -> ir.Value:
        """Probabilities [B,R,V], 0 if truncated. normalized: they sum to 1."""
        op = self.op
        temperature = op("Max", op.per_request("temperature"), op.const(MIN_TEMPERATURE, F32))
        p = op("Softmax", op("Div", logits, temperature), axis=-1)
        if self.sampler == "sample":
            return p
        values = largest_probabilities(op, p, rows, self.vocab_size)
        smallest = smallest_kept(op, values, min(MAX_CANDIDATES, self.vocab_size))
        kept = op("Cast", op("GreaterOrEqual", p, smallest), to=int(ir.DataType.FLOAT))
        p = op("Mul", p, kept)  # a third of the time of a Where
        if not normalized:
            return p
        is_truncated = op("Greater", smallest, op.const(0, F32))
        total = op("ReduceSum", p, op.const([2]), keepdims=1)
        return op("Div", p, op("Where", is_truncated, total, op.const(1, F32)))

    def draw(self, w: ir.Value, noise_of: RowNoise, rows: int) -> ir.Value:
        """Draw tokens [B,R] in proportion to w [B,R,V]: first a block, then one of its tokens
        (`pass_runtime.bundle.noise`).

        At temperature 0 the best token must win, the lowest id of tied ones. Token i of block k
        has the id i*K + k: so a block's weight is its best token's, halved i times, and
        MIN_TEMPERATURE makes the others 0. An ArgMax over all tokens would take a CPU longer.
        """
        op, size, blocks = self.op, noise.BLOCK_SIZE, noise.vocabulary_blocks(self.vocab_size)
        if self.vocab_size < blocks * size:
            w = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * size - self.vocab_size]))
        by_block, axis = op("Reshape", w, op.const([-1, rows, size, blocks])), op.const([2])
        halved = op("Mul", by_block, op.const(0.5 ** np.arange(size).reshape(1, 1, -1, 1), F32))
        mass = op("ReduceSum", by_block, axis, keepdims=0)
        best = op("ReduceMax", halved, axis, keepdims=0)
        block_weights = op("Where", self.is_noisy(), mass, best)
        return op("Squeeze", self._race(block_weights, w, noise_of, blocks), axis)

    def draw_candidate(self, scores: ir.Value, noise_of: RowNoise) -> ir.Value:
        """Draw from K blocks alone. Return an index [B,1,1] in scores [B,1,8K]: the first tokens
        of all blocks, then the second ones ..."""
        op, size = self.op, noise.BLOCK_SIZE
        w = SamplerNodes(op, self.sampler, size * CANDIDATE_BLOCKS).weights(scores, 1)
        by_block = op("Reshape", w, op.const([-1, 1, size, CANDIDATE_BLOCKS]))
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=0)
        return self._race(mass, w, noise_of, CANDIDATE_BLOCKS)

    def is_noisy(self) -> ir.Value:
        """Whether temperature is above 0: bool [B,1,1]."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _race(self, mass: ir.Value, w: ir.Value, noise_of: RowNoise, blocks: int) -> ir.Value:
        """Return the index [B,R,1] of the least weight / noise: of blocks with mass [B,R,K],
        then of its tokens in w [B,R,8K]."""
        op = self.op
        block = op("ArgMin", op("Div", mass, noise_of.blocks), axis=2, keepdims=1)  # [B,R,1]
        tokens = op("Add", block, op.const(blocks * np.arange(noise.BLOCK_SIZE)))  # [B,R,8]
        quotients = op("Div", op("GatherElements", w, tokens, axis=2), noise_of.tokens)
        return op("GatherElements", tokens, op("ArgMin", quotients, axis=2, keepdims=1), axis=2)
