"""The random numbers of `pass_runtime.bundle.noise` as ONNX operators.

B is the batch size, P a number of positions, I the number of table entries that a position reads
(see `noise.entries_per_position`), R a number of rows, and K the number of blocks of token ids that
a row draws from.
"""

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
    """The noise for drawing one token in each of R rows.

    blocks [B,R,K]: a number for each block. tokens [B,R,8]: one for each token of the drawn block.
    All are negative: -E for an exponential variable E.
    """

    blocks: ir.Value
    tokens: ir.Value


@dataclass(frozen=True)
class NoiseNodes:
    """Adds nodes that compute noise."""

    op: GraphTape
    vocab_size: int

    def at(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """Return the numbers -E = log(1 - u), [B,P,I] float32, of P = `count` positions.

        The positions are those after `before` [B]; `stream` is one of `noise.STREAMS`. Noise does
        not depend on tokens, so a tail computes it for all its positions at once.
        """
        op, u = self.op, self._uniform(self._table_sum(self._offsets(before, count, stream), count))
        one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(-1 / 3, F32)
        series = op("Mul", u, op("Sub", op("Mul", u, op("Sub", op("Mul", u, third), half)), one))
        is_small = op("Less", u, op.const(noise.SERIES_LIMIT, F32))
        return op("Where", is_small, series, op("Log", op("Sub", one, u)))

    def of_all_blocks(self, numbers: ir.Value) -> RowNoise:
        """Return the noise of R rows that may draw every block. numbers [B,R,I]: from `at`."""
        (block_start, blocks), (_, tokens) = noise.entries_per_position(self.vocab_size)
        # Entries for tokens, unused ones, entries for blocks, and perhaps unused ones again.
        sizes = [tokens, block_start - tokens, blocks, self.entries - block_start - blocks]
        parts = self.op.split(numbers, [size for size in sizes if size], axis=2)
        return RowNoise(parts[2], parts[0])

    def of_candidates(
        self, numbers: ir.Value, count: int, before: ir.Value, blocks: ir.Value, rows: int
    ) -> list[RowNoise]:
        """Return the noise of each of R = `rows` rows that draw from its `blocks` [B,R,K] alone.

        numbers [B,P,I]: from `at` for P = `count` positions. before [B,1]: row r draws for the
        position that has the index before + 1 + r among these. Each result has R = 1.
        """
        op, (block_start, _), (_, tokens) = self.op, *noise.entries_per_position(self.vocab_size)
        # Indices into the entries of all positions, one position after the other.
        begin = op("Unsqueeze", op("Mul", before, op.const(self.entries)), op.const([2]))  # [B,1,1]
        row_start = self.entries * (1 + np.arange(rows)).reshape(1, -1, 1)
        of_blocks = op(
            "Reshape",
            op("Add", blocks, op.const(row_start + block_start)),
            op.const([-1, 1, rows * CANDIDATE_BLOCKS]),
        )
        of_tokens = op("Add", begin, op.const((row_start + np.arange(tokens)).reshape(1, 1, -1)))
        indices = op("Concat", of_tokens, op("Add", begin, of_blocks), axis=2)
        flat = op("Reshape", numbers, op.const([-1, 1, count * self.entries]))
        sizes = [tokens] * rows + [CANDIDATE_BLOCKS] * rows
        parts = op.split(op("GatherElements", flat, indices, axis=2), sizes, axis=2)
        return [RowNoise(*pair) for pair in zip(parts[rows:], parts[:rows], strict=True)]

    def uniform(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """Return a number u in (0, 1) for each position, [B,P,1] float32; arguments as in `at`."""
        op = self.op
        entries = op("Mul", self._offsets(before, count, stream), op.const(noise.ROW_SIZE))
        parts = [
            op("Gather", op("Reshape", table, op.const([-1])), entry)
            for table, entry in zip(self._tables(), op.split(entries, [1, 1], axis=2), strict=True)
        ]
        return self._uniform(op("Add", *parts))

    @property
    def entries(self) -> int:
        """I, the number of table entries that a position reads."""
        return noise.rows_per_position(self.vocab_size) * noise.ROW_SIZE

    def _offsets(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """Return the offsets [B,P,2] into the tables of the P positions after `before` [B]."""
        op = self.op
        steps = np.repeat(1 + np.arange(count), 2).reshape(1, count, 2)
        positions = op("Add", op("Unsqueeze", before, op.const([1, 2])), op.const(steps))
        offsets = op.input(stream, np.int64, ["batch", "positions", 2])
        return op("GatherElements", offsets, positions, axis=1)

    def _tables(self) -> list[ir.Value]:
        """Return the two noise tables [rows,16] int32, which all tails of a bundle share."""
        tables = noise.noise_tables(self.vocab_size)
        return [
            self.op.const(table, np.int32, name)
            for name, table in zip(noise.TABLES, tables, strict=True)
        ]

    def _table_sum(self, offsets: ir.Value, count: int) -> ir.Value:
        """Return T1[16 b + i] + T2[16 d + i] for i = 0 .. I-1, [B,P,I] int32.

        offsets [B,P,2]: (b, d) of each position. Whole table rows of 16 entries are gathered.
        """
        op, rows = self.op, self.op.const(np.arange(noise.rows_per_position(self.vocab_size)))
        parts = [
            op("Gather", table, op("Add", rows, offset), axis=0)  # [B,P,rows,16]
            for table, offset in zip(self._tables(), op.split(offsets, [1, 1], axis=2), strict=True)
        ]
        return op("Reshape", op("Add", *parts), op.const([-1, count, self.entries]))

    def _uniform(self, total: ir.Value) -> ir.Value:
        """Return uniform numbers u in (0, 1), float32, by sums of two table entries, int32.

        The entries have 30 bits, so int32 holds their sum, and subtracting 2^30 once is the modulo.
        At temperature 0 all u are equal, so that the largest probability wins.
        """
        op, modulus = self.op, self.op.const(1 << noise.BITS, np.int32)
        x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
        is_noisy = op("Greater", op.per_request("temperature"), op.const(0, F32))
        scale = op("Where", is_noisy, op.const(noise.SCALE, F32), op.const(0, F32))
        scaled = op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale)
        return op("Add", scaled, op.const(0.5 * noise.SCALE, F32))
