"""The random numbers of `pass_runtime.bundle.noise` as ONNX operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise
from pass_runtime.bundle.head import CANDIDATE_BLOCKS

F32 = np.float32


@dataclass(frozen=True)
class RowNoise:
    """Noise for one token in each of R rows: blocks [B,R,K], a number for each block of tokens, and
    tokens [B,R,8], one for each token of a block. All are -E, with E exponentially distributed."""

    blocks: ir.Value
    tokens: ir.Value


@dataclass(frozen=True)
class NoiseNodes:
    """Adds nodes that compute noise.

    B is the batch size, P the number of positions, I the number of table entries that a position
    reads.
    """

    op: GraphTape
    vocab_size: int

    def at(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """[B,P,I] float32: -E = log(1 - u) of the P = `count` positions after `before` [B].

        They do not depend on tokens, so a tail computes them for all its positions at once.
        """
        op, u = self.op, self._uniform(self._table_sum(self._offsets(before, count, stream), count))
        one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(-1 / 3, F32)
        series = op("Mul", u, op("Sub", op("Mul", u, op("Sub", op("Mul", u, third), half)), one))
        return op(
            "Where",
            op("Less", u, op.const(noise.SERIES_LIMIT, F32)),
            series,
            op("Log", op("Sub", one, u)),
        )

    def of_all_blocks(self, numbers: ir.Value) -> RowNoise:
        """numbers [B,R,I], from `at` -> the noise of R rows in which every block may be drawn."""
        (start, blocks), (_, tokens) = noise.entries_per_position(self.vocab_size)
        sizes = [tokens, start - tokens, blocks, self.entries - start - blocks]
        parts = self.op.split(numbers, [size for size in sizes if size], axis=2)
        return RowNoise(parts[2], parts[0])

    def of_candidates(
        self, numbers: ir.Value, count: int, before: ir.Value, blocks: ir.Value, rows: int
    ) -> list[RowNoise]:
        """Return the noise of R rows that draw from `blocks` [B,R,K], by row: [B,1,K] and [B,1,8].

        numbers [B,P,I]: those of P = `count` positions. before [B,1] int64: the first row's token
        has that of the next one of them, and so on.
        """
        op, (start, _), (_, tokens) = self.op, *noise.entries_per_position(self.vocab_size)
        begin = op("Unsqueeze", op("Mul", before, op.const(self.entries)), op.const([2]))  # [B,1,1]
        row = self.entries * (1 + np.arange(rows)).reshape(1, -1, 1)
        of_blocks = op(
            "Reshape",
            op("Add", blocks, op.const(row + start)),
            op.const([-1, 1, rows * CANDIDATE_BLOCKS]),
        )
        of_tokens = op("Add", begin, op.const((row + np.arange(tokens)).reshape(1, 1, -1)))
        places = op("Concat", of_tokens, op("Add", begin, of_blocks), axis=2)
        flat = op("Reshape", numbers, op.const([-1, 1, count * self.entries]))
        sizes = [tokens] * rows + [CANDIDATE_BLOCKS] * rows
        parts = op.split(op("GatherElements", flat, places, axis=2), sizes, axis=2)
        return [RowNoise(*pair) for pair in zip(parts[rows:], parts[:rows], strict=True)]

    def uniform(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """[B,P,1] float32: numbers u in (0, 1) of the P = `count` positions after `before`."""
        op = self.op
        places = op("Mul", self._offsets(before, count, stream), op.const(noise.ROW_SIZE))
        parts = [
            op("Gather", op("Reshape", table, op.const([-1])), place)
            for table, place in zip(self._tables(), op.split(places, [1, 1], axis=2), strict=True)
        ]
        return self._uniform(op("Add", *parts))

    @property
    def entries(self) -> int:
        """I"""
        return noise.rows_per_position(self.vocab_size) * noise.ROW_SIZE

    def _offsets(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """[B,P,2]: the noise table offsets of the P positions after `before` [B]."""
        op = self.op
        steps = np.repeat(1 + np.arange(count), 2).reshape(1, count, 2)
        positions = op("Add", op("Unsqueeze", before, op.const([1, 2])), op.const(steps))
        return op(
            "GatherElements",
            op.input(stream, np.int64, ["batch", "positions", 2]),
            positions,
            axis=1,
        )

    def _tables(self) -> list[ir.Value]:
        """Return the two noise tables [rows,16] int32, which all tails of a bundle share."""
        tables = noise.noise_tables(self.vocab_size)
        return [
            self.op.const(table, np.int32, name)
            for name, table in zip(noise.TABLES, tables, strict=True)
        ]

    def _table_sum(self, offsets: ir.Value, count: int) -> ir.Value:
        """[B,P,I] int32: T1[16b + i] + T2[16d + i] for i = 0 .. I-1, by offsets (b, d) [B,P,2].

        It gathers whole table rows of 16.
        """
        op, rows = self.op, self.op.const(np.arange(noise.rows_per_position(self.vocab_size)))
        parts = [
            op("Gather", table, op("Add", rows, offset), axis=0)  # [B,P,rows,16]
            for table, offset in zip(self._tables(), op.split(offsets, [1, 1], axis=2), strict=True)
        ]
        return op("Reshape", op("Add", *parts), op.const([-1, count, self.entries]))

    def _uniform(self, total: ir.Value) -> ir.Value:
        """Table sums, int32 without overflow -> uniform numbers u in (0, 1), float32; at
        temperature 0 all the same."""
        op, modulus = self.op, self.op.const(1 << noise.BITS, np.int32)
        x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
        noisy = op("Greater", op.per_request("temperature"), op.const(0, F32))
        scale = op("Where", noisy, op.const(noise.SCALE, F32), op.const(0, F32))
        return op(
            "Add",
            op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale),
            op.const(0.5 * noise.SCALE, F32),
        )
