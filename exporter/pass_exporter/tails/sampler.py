"""The sampler of `pass_runtime.bundle.reference` as ONNX operators, for the tail graphs.

It uses only operators that TensorRT-RTX supports: no modulo, no bitwise operators, and TopK with a constant k only.
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

    B is the batch size, R the number of rows, V the vocabulary size, K the number of blocks of tokens. The token that
    is drawn in a row gets the position `root + depth + 1`: `root` [B] int64 is the position of the window's root, and
    `depth` has one entry per row.
    """

    op: GraphTape
    sampler: Sampler
    vocab_size: int

    @cached_property
    def noise(self) -> NoiseNodes:
        return NoiseNodes(self.op, self.vocab_size)

    def sample(self, logits: ir.Value, root: ir.Value, depth: list[int]) -> ir.Value:
        """logits [B,R,V] -> [B,R] int64: the token that follows each row."""
        if self.sampler == "greedy":
            return self.op("ArgMax", logits, axis=-1, keepdims=0)
        return self.draw(self.weights(logits, len(depth)), self.row_noise(root, depth, "noise_offsets"), len(depth))

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

    def row_noise(self, root: ir.Value, depth: list[int], stream: str) -> RowNoise:
        """The noise of `stream` for the tokens that follow R rows: blocks [B,R,K], tokens [B,R,8]."""
        offsets = self.noise.offsets(self._positions(root, depth), stream)
        return self.noise.split(self.noise.exponential(offsets, len(depth)))

    def draw(self, w: ir.Value, noise_of: RowNoise, rows: int) -> ir.Value:
        """w [B,R,V], non-negative and unnormalized -> [B,R] tokens.

        Draws a block of tokens, then one of its tokens, by exponential sampling (`pass_runtime.bundle.noise`). At
        temperature 0, of tied tokens the one with the lowest id must win, so there it is the ArgMax of `w`.
        """
        op, size, blocks = self.op, noise.BLOCK_SIZE, noise.vocabulary_blocks(self.vocab_size)
        padded = w
        if self.vocab_size < blocks * size:
            padded = op("Pad", w, op.const([0, 0, 0, 0, 0, blocks * size - self.vocab_size]))
        mass = op("ReduceSum", op("Reshape", padded, op.const([-1, rows, size, blocks])), op.const([2]), keepdims=0)
        drawn = self._race(mass, padded, noise_of, blocks)
        likeliest = op("ArgMax", w, axis=2, keepdims=1)
        return op("Squeeze", op("Where", self.is_noisy(), drawn, likeliest), op.const([2]))

    def draw_candidate(self, scores: ir.Value, noise_of: RowNoise) -> ir.Value:
        """Draws the token that `sample` would draw if all tokens outside K candidate blocks had probability 0.

        scores [B,1,8K]: the logits of the blocks' tokens: the first token of every block, then the second of every
        block, and so on. noise_of: blocks [B,1,K], tokens [B,1,8]. Returns [B,1,1], an index into `scores`.
        """
        w, by_block = self._candidate_weights(scores, 1)
        mass = self.op("ReduceSum", by_block, self.op.const([2]), keepdims=0)
        return self._race(mass, w, noise_of, CANDIDATE_BLOCKS)

    def rank_candidates(self, scores: ir.Value, rows: int, noise_of: RowNoise | None) -> ir.Value:
        """scores [B,rows,8K], each row as in `draw_candidate` -> [B,rows,8K] keys that rank the candidates.

        The candidate with the largest key is the one that `draw_candidate` draws. A key is the block's times the
        token's, divided by the largest of the block's tokens; at temperature 0, and if greedy, it is the score.
        noise_of: blocks [B,1,K], tokens [B,1,8]; None if greedy.
        """
        op = self.op
        if noise_of is None:
            return scores
        _, by_block = self._candidate_weights(scores, rows)
        mass = op("ReduceSum", by_block, op.const([2]), keepdims=1)
        of_blocks = op("Div", mass, op("Unsqueeze", noise_of.blocks, op.const([1])))  # [B,rows,1,K]
        of_tokens = op("Div", by_block, op("Reshape", noise_of.tokens, op.const([-1, 1, noise.BLOCK_SIZE, 1])))
        first = op("Max", op("ReduceMax", of_tokens, op.const([2]), keepdims=1), op.const(MIN_POSITIVE, F32))
        relative = op("Div", of_tokens, first)  # 1 for the first token of a block
        combined = op("Mul", of_blocks, relative)
        flat = op("Reshape", combined, op.const([0, rows, noise.BLOCK_SIZE * CANDIDATE_BLOCKS]))
        return op("Where", self.is_noisy(), flat, scores)

    def candidate_noise(
        self, exponential: ir.Value, positions: int, first: ir.Value, blocks: ir.Value, rows: int
    ) -> RowNoise:
        """Picks the noise of R rows, whose candidates are the tokens of `blocks` [B,R,K]: blocks [B,R,K], tokens
        [B,R,8].

        exponential [B,P,I]: the noise of P positions. first [B,1] int64: which of them the token of the first row has;
        the other rows follow.
        """
        op, entries = self.op, noise.rows_per_position(self.vocab_size) * noise.ROW_SIZE
        (start, _), (_, size) = noise.entries_per_position(self.vocab_size)
        begin = op("Unsqueeze", op("Mul", first, op.const(entries)), op.const([2]))  # [B,1,1]
        later = entries * np.arange(rows).reshape(1, -1, 1)
        of_tokens = op("Add", begin, op.const(later + np.arange(size)))
        of_blocks = op("Add", op("Add", begin, op.const(later + start)), blocks)
        every = op("Reshape", exponential, op.const([0, positions * entries]))
        parts = []
        for entry, width in ((of_blocks, CANDIDATE_BLOCKS), (of_tokens, size)):
            picked = op("GatherElements", every, op("Reshape", entry, op.const([0, rows * width])), axis=1)
            parts.append(op("Reshape", picked, op.const([0, rows, width])))
        return RowNoise(*parts)

    def uniform(self, root: ir.Value, depth: list[int], stream: str) -> ir.Value:
        """[B,R,1] float32: a uniform random number in (0, 1) for the token that follows each row."""
        return self.noise.uniform(self.noise.offsets(self._positions(root, depth), stream))

    def is_noisy(self) -> ir.Value:
        """[B,1,1] bool: whether the request's temperature is above 0."""
        return self.op("Greater", self.op.per_request("temperature"), self.op.const(0, F32))

    def _positions(self, root: ir.Value, depth: list[int]) -> ir.Value:
        """[B,R,2]: the position `root + depth + 1`, twice."""
        op = self.op
        return op("Add", op("Unsqueeze", root, op.const([1, 2])), op.const([[[d + 1] * 2 for d in depth]]))

    def _race(self, mass: ir.Value, w: ir.Value, noise_of: RowNoise, blocks: int) -> ir.Value:
        """mass [B,R,K], the sums of the blocks, and w [B,R,8K] -> [B,R,1]: the index of the token that is drawn."""
        op = self.op
        block = op("ArgMax", op("Div", mass, noise_of.blocks), axis=2, keepdims=1)  # [B,R,1]
        indices = op("Add", block, op.const(blocks * np.arange(noise.BLOCK_SIZE)))  # [B,R,8]
        keys = op("Div", op("GatherElements", w, indices, axis=2), noise_of.tokens)
        return op("GatherElements", indices, op("ArgMax", keys, axis=2, keepdims=1), axis=2)

    def _candidate_weights(self, scores: ir.Value, rows: int) -> tuple[ir.Value, ir.Value]:
        """scores [B,rows,8K] -> the candidates' probabilities [B,rows,8K], and these by block [B,rows,8,K]."""
        w = SamplerNodes(self.op, self.sampler, noise.BLOCK_SIZE * CANDIDATE_BLOCKS).weights(scores, rows)
        return w, self.op("Reshape", w, self.op.const([-1, rows, noise.BLOCK_SIZE, CANDIDATE_BLOCKS]))
