"""The random numbers of `pass_runtime.bundle.noise` as ONNX operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.tape import GraphTape
from pass_runtime.bundle import noise

F32 = np.float32


@dataclass(frozen=True)
class RowNoise:
    """Exponential noise for one token in each of R rows. blocks [B,R,1,K] or [B,R,K]: one number for each block of
    tokens. tokens [B,R,8]: one for each token of a block."""

    blocks: ir.Value
    tokens: ir.Value


@dataclass(frozen=True)
class NoiseNodes:
    """Adds nodes that compute noise.

    B is the batch size, R the number of positions. offsets [B,R,2]: those of the positions, from `offsets`.
    """

    op: GraphTape
    vocab_size: int

    def offsets(self, positions: ir.Value, stream: str) -> ir.Value:
        """positions [B,R,2] int64, each one twice -> [B,R,2]: their noise table offsets."""
        listed = self.op.input(stream, np.int64, ["batch", "positions", 2])
        return self.op("GatherElements", listed, positions, axis=1)

    def exponential(self, offsets: ir.Value, rows: int) -> ir.Value:
        """[B,R,I] float32: exponential noise E = -log(1 - u), one number for each entry that a position reads."""
        op, u = self.op, self._uniform(self._table_sum(offsets, rows))
        one, half, third = op.const(1, F32), op.const(0.5, F32), op.const(1 / 3, F32)
        series = op("Mul", u, op("Add", one, op("Mul", u, op("Add", half, op("Mul", u, third)))))
        exact = op("Neg", op("Log", op("Sub", one, u)))
        return op("Where", op("Less", u, op.const(noise.SERIES_LIMIT, F32)), series, exact)

    def split(self, exponential: ir.Value) -> RowNoise:
        """[B,R,I] -> the noise of all blocks [B,R,K], and of the tokens of a block."""
        total = noise.rows_per_position(self.vocab_size) * noise.ROW_SIZE
        (start, blocks), (_, tokens) = noise.entries_per_position(self.vocab_size)
        sizes = [tokens, start - tokens, blocks, total - start - blocks]
        parts = self.op.split(exponential, [size for size in sizes if size], axis=2)
        return RowNoise(parts[2], parts[0])

    def uniform(self, offsets: ir.Value) -> ir.Value:
        """[B,R,1] float32: a uniform random number in (0, 1) for each position."""
        op = self.op
        first = op("Mul", offsets, op.const(noise.ROW_SIZE))
        entries = [
            op("Gather", op("Reshape", table, op.const([-1])), offset)
            for table, offset in zip(self._tables(), op.split(first, [1, 1], axis=2), strict=True)
        ]
        return self._uniform(op("Add", *entries))

    def _tables(self) -> list[ir.Value]:
        """The two noise tables [rows,16] int32, which all tails of a bundle share."""
        tables = noise.noise_tables(self.vocab_size)
        return [self.op.const(table, np.int32, name) for name, table in zip(noise.TABLES, tables, strict=True)]

    def _table_sum(self, offsets: ir.Value, rows: int) -> ir.Value:
        """[B,R,I] int32: T1[16b + i] + T2[16d + i] for i = 0 .. I-1, with the offsets (b, d) of each position.

        It gathers whole table rows of 16.
        """
        op, count = self.op, noise.rows_per_position(self.vocab_size)
        parts = [
            op("Gather", table, op("Add", op.const(np.arange(count)), offset), axis=0)  # [B,R,count,16]
            for table, offset in zip(self._tables(), op.split(offsets, [1, 1], axis=2), strict=True)
        ]
        return op("Reshape", op("Add", *parts), op.const([-1, rows, count * noise.ROW_SIZE]))

    def _uniform(self, total: ir.Value) -> ir.Value:
        """Table sums, int32 without overflow -> uniform numbers u in (0, 1), float32; at temperature 0 all the same."""
        op = self.op
        modulus = op.const(1 << noise.BITS, np.int32)
        x = op("Where", op("Less", total, modulus), total, op("Sub", total, modulus))
        noisy = op("Greater", op.per_request("temperature"), op.const(0, F32))
        scale = op("Where", noisy, op.const(noise.SCALE, F32), op.const(0, F32))
        return op("Add", op("Mul", op("Cast", x, to=int(ir.DataType.FLOAT)), scale), op.const(0.5 * noise.SCALE, F32))
