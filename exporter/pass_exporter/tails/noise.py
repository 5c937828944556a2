"""`pass_runtime.bundle.noise` as ONNX operators. P: positions, I: entries of each, R: rows, K:
blocks."""

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
    """-E to draw one token in R rows: for blocks [B,R,K], and their tokens [B,R,8]."""

    blocks: ir.Value
    tokens: ir.Value


@dataclass(frozen=True)
class NoiseNodes:
    op: GraphTape
    vocab_size: int

    def at(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        """-E = log(1 - u), [B,P,I] float32, of `count` positions after `before` [B]."""
        op, u = self.op, self._uniform(self._table_sum(self._offsets(before, count, stream), count))
        one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(-1 / 3, F32)
        series = op("Mul", u, op("Sub", op("Mul", u, op("Sub", op("Mul", u, third), half)), one))
        is_small = op("Less", u, op.const(noise.SERIES_LIMIT, F32))
        return op("Where", is_small, series, op("Log", op("Sub", one, u)))

    def of_all_blocks(self, numbers: ir.Value) -> RowNoise:
        """Of R rows that may draw every block. numbers [B,R,I]: from `at`."""
        (block_start, blocks), (_, tokens) = noise.entries_per_position(self.vocab_size)
        # entries for tokens, unused ones, for blocks, perhaps unused ones
        sizes = [tokens, block_start - tokens, blocks, self.entries - block_start - blocks]
        parts = self.op.split(numbers, [size for size in sizes if size], axis=2)
        return RowNoise(parts[2], parts[0])

    def of_candidates(
        self, numbers: ir.Value, count: int, before: ir.Value, blocks: ir.Value, rows: int
    ) -> list[RowNoise]:
        """Of rows that draw from `blocks` [B,R,K] alone. numbers [B,P,I]: from `at`. Row r draws
        for the position before [B,1] + 1 + r."""
        op, (block_start, _), (_, tokens) = self.op, *noise.entries_per_position(self.vocab_size)
        # Indices into the entries, one position after the other.
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
        """u in (0, 1) by position, [B,P,1]."""
        op = self.op
        entries = op("Mul", self._offsets(before, count, stream), op.const(noise.ROW_SIZE))
        parts = [
            op("Gather", op("Reshape", table, op.const([-1])), entry)
            for table, entry in zip(self._tables(), op.split(entries, [1, 1], axis=2), strict=True)
        ]
        return self._uniform(op("Add", *parts))

    @property
    def entries(self) -> int:
        return noise.rows_per_position(self.vocab_size) * noise.ROW_SIZE

    def _offsets(self, before: ir.Value, count: int, stream: str) -> ir.Value:
        op = self.op
        steps = np.repeat(1 + np.arange(count), 2).reshape(1, count, 2)
        positions = op("Add", op("Unsqueeze", before, op.const([1, 2])), op.const(steps))
        offsets = op.input(stream, np.int64, ["batch", "positions", 2])
        return op("GatherElements", offsets, positions, axis=1)

    def _tables(self) -> list[ir.Value]:
        tables = noise.noise_tables(self.vocab_size)
        return [
            self.op.const(table, np.int32, name)
            for name, table in zip(noise.TABLES, tables, strict=True)
        ]

    def _table_sum(self, offsets: ir.Value, count: int) -> ir.Value:
        """T1[16 b + i] + T2[16 d + i], [B,P,I] int32, by offsets (b, d) [B,P,2]."""
        op, rows = self.op, self.op.const(np.arange(noise.rows_per_position(self.vocab_size)))
        parts = [
            op("Gather", table, op("Add", rows, offset), axis=0)  # [B,P,rows,16]
            for table, offset in zip(self._tables(), op.split(offsets, [1, 1], axis=2), strict=True)
        ]
        return op("Reshape", op("Add", *parts), op.const([-1, count, self.entries]))

    def _uniform(self, total: ir.Value) -> ir.Value:
        """Subtract 2^30 once: the modulo of two 30-bit entries. At temperature 0 all are equal:
        the largest probability wins."""
        op, modulus = self.op, self.op.const(1 << noise.BITS, np.int32)
        x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
        is_noisy = op("Greater", op.per_request("temperature"), op.const(0, F32))
        scale = op("Where", is_noisy, op.const(noise.SCALE, F32), op.const(0, F32))
        scaled = op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale)
        return op("Add", scaled, op.const(0.5 * noise.SCALE, F32))
