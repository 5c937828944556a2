"""Truncation and sampling of `pass_runtime.bundle.reference` as ONNX operators.

All operators are ones that TensorRT-RTX supports: no modulo, no bitwise operators, no 64-bit
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
    token ids (8 ids each) that tokens are drawn from.
    """

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    @cached_property
    def noise(self) -> NoiseNodes:
        return NoiseNodes(self.op, self.vocab_size)

    def weights(self, logits: ir.Value, rows: int, *, normalized: bool = False) -> ir.Value:
        """Return the probability [B,R,V] of every token by logits [B,R,V]; 0 for truncated tokens.

        normalized: whether the remaining probabilities are scaled to sum to 1. If truncation
        removes nothing, the result equals that without truncation to the last bit.
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
        is_truncated = op("Greater", smallest, op.const(0, F32))
        total = op("ReduceSum", p, op.const([2]), keepdims=1)
        return op("Div", p, op("Where", is_truncated, total, op.const(1, F32)))

    def draw(self, w: ir.Value, noise_of: RowNoise, rows: int) -> ir.Value:
        """Draw tokens [B,R] with probabilities proportional to w [B,R,V] (not negative).

        First a block of tokens is drawn, then one of its tokens, by exponential sampling
        (`pass_runtime.bundle.noise`). At temperature 0 the most likely token must win; of tied
        tokens, the one with the lowest id. Token i of block k has the id i*K + k. So at temperature
        0 a block's weight is that of its best token, halved i times: of tied tokens, one with a
        lower i wins. (MIN_TEMPERATURE makes the weights of all less likely tokens 0, so these never
        win.) An ArgMax over all tokens would take a CPU longer.
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
        """Draw as `draw` would if all tokens outside K blocks had probability 0.

        scores [B,1,8K]: the logits of the blocks' tokens, first the first tokens of all blocks,
        then the second tokens, and so on. noise_of: the noise of the K blocks. Returns the index
        [B,1,1] of the token in `scores`.
        """
        w, by_block = self._candidate_weights(scores, 1)
        mass = self.op("ReduceSum", by_block, self.op.const([2]), keepdims=0)
        return self._race(mass, w, noise_of, CANDIDATE_BLOCKS)

    def rank_candidates(self, scores: ir.Value, rows: int, noise_of: RowNoise) -> ir.Value:
        """Return keys [B,rows,8K] that rank the candidate tokens with these scores [B,rows,8K].

        The token with the largest key is the one that `draw_candidate` draws: the best token of a
        block has the key mass / E of the block, and another token of it has a part of this, the
        quotient of its own weight / E and the best token's. At temperature 0 the key is the score.
        noise_of: blocks [B,1,K] and tokens [B,1,8], for all rows.
        """
        op = self.op
        _, by_block = self._candidate_weights(scores, rows)
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=1)
        # [B,rows,1,K]
        of_blocks = op("Div", mass, op("Neg", op("Unsqueeze", noise_of.blocks, op.const([1]))))
        of_tokens = op("Div", by_block, op("Neg", op("Unsqueeze", noise_of.tokens, op.const([3]))))
        largest = op("ReduceMax", of_tokens, op.const([2]), keepdims=1)
        largest = op("Max", largest, op.const(MIN_POSITIVE, F32))  # a divisor, so not 0
        keys = op("Mul", of_blocks, op("Div", of_tokens, largest))
        flat = op("Reshape", keys, op.const([0, rows, noise.BLOCK_SIZE * CANDIDATE_BLOCKS]))
        return op("Where", self.is_noisy(), flat, scores)

    def is_noisy(self) -> ir.Value:
        """Return whether each request's temperature is above 0: bool [B,1,1]."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _race(self, mass: ir.Value, w: ir.Value, noise_of: RowNoise, blocks: int) -> ir.Value:
        """Return the drawn token's index [B,R,1] in the weights w [B,R,8K] of tokens.

        mass [B,R,K]: the weights of the K = `blocks` blocks. Weights are divided by the noise -E,
        and the least quotient wins: first among the blocks, then among the tokens of the block.
        """
        op = self.op
        block = op("ArgMin", op("Div", mass, noise_of.blocks), axis=2, keepdims=1)  # [B,R,1]
        tokens = op("Add", block, op.const(blocks * np.arange(noise.BLOCK_SIZE)))  # [B,R,8]
        quotients = op("Div", op("GatherElements", w, tokens, axis=2), noise_of.tokens)
        return op("GatherElements", tokens, op("ArgMin", quotients, axis=2, keepdims=1), axis=2)

    def _candidate_weights(self, scores: ir.Value, rows: int) -> tuple[ir.Value, ir.Value]:
        """Return the probabilities [B,rows,8K] by scores [B,rows,8K]; again as [B,rows,8,K]."""
        w = SamplerNodes(self.op, self.sampler, noise.BLOCK_SIZE * CANDIDATE_BLOCKS).weights(
            scores, rows
        )
        return w, self.op(
            "Reshape", w, self.op.const([-1, rows, noise.BLOCK_SIZE, CANDIDATE_BLOCKS])
        )
