"""Selects noise for tokens from the noise of all positions that a pass may draw tokens for.

The *place* of a position is its index among these positions. Shapes are those of
`tails.noise_nodes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder
from pass_exporter.tails.noise_nodes import RowNoise


@dataclass(frozen=True)
class WindowNoise:
    """The noise of P = `count` consecutive positions. numbers: [B,P,I], `NoiseNodes.at` of the
    positions, with I numbers for each."""

    tail: TailBuilder
    numbers: ir.Value
    count: int

    @staticmethod
    def after(tail: TailBuilder, before: ir.Value, count: int, stream: str) -> WindowNoise:
        """Return the noise of the positions after `before` [B]."""
        return WindowNoise(tail, tail.sampler.noise.at(before, count, stream), count)

    def at(self, places: list[int]) -> RowNoise:
        """Return the noise of rows that draw for these places, which are the same in all slots."""
        numbers = self.numbers
        if places != list(range(self.count)):
            numbers = self.tail.op("Gather", numbers, self.tail.op.const(places), axis=1)
        return self.tail.sampler.noise.of_all_blocks(numbers)

    def sample(self, logits: ir.Value, places: list[int]) -> ir.Value:
        """Return tokens [B,R] int64, drawn from logits [B,R,V] of rows that draw for `places`."""
        sampler = self.tail.sampler
        return sampler.draw(sampler.weights(logits, len(places)), self.at(places), len(places))


@dataclass(frozen=True)
class ChainNoise:
    """The noise of a chain's drafts, which have the `count` places after place `before` [B,1]."""

    window: WindowNoise
    before: ir.Value
    count: int

    def of_all_blocks(self) -> RowNoise:
        """Return the noise of all drafts if every block may be drawn."""
        tail, noise = self.window.tail, self.window.tail.sampler.noise
        places = tail.op("Add", self.before, tail.op.const(1 + np.arange(self.count)[None]))
        return noise.of_all_blocks(
            tail.pick_rows(self.window.numbers, places, self.window.count, noise.entries)
        )

    def of_row(self, j: int) -> RowNoise:
        """Return the noise of draft j alone if every block may be drawn."""
        rows, split, sizes = self.of_all_blocks(), self.window.tail.op.split, [1] * self.count
        return RowNoise(split(rows.blocks, sizes, axis=1)[j], split(rows.tokens, sizes, axis=1)[j])

    def of_candidates(self, blocks: ir.Value) -> list[RowNoise]:
        """Return the noise of every draft if only `blocks` [B,count,K] may be drawn."""
        noise = self.window.tail.sampler.noise
        return noise.of_candidates(
            self.window.numbers, self.window.count, self.before, blocks, self.count
        )
