"""The noise of all positions for which a pass may draw a token, and drafts drawn with it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pass_exporter.tails.builder import TailBuilder
from pass_exporter.tails.noise_nodes import RowNoise


@dataclass(frozen=True)
class WindowNoise:
    """numbers [B,P,I]: noise of the P = `count` positions after `before` [B], at places 0 ..
    P-1."""

    tail: TailBuilder
    numbers: ir.Value
    count: int

    @staticmethod
    def after(tail: TailBuilder, before: ir.Value, count: int, stream: str) -> WindowNoise:
        return WindowNoise(tail, tail.sampler.noise.at(before, count, stream), count)

    def at(self, places: list[int]) -> RowNoise:
        """Return the noise of rows whose tokens have these places."""
        numbers = self.numbers
        if places != list(range(self.count)):
            numbers = self.tail.op("Gather", numbers, self.tail.op.const(places), axis=1)
        return self.tail.sampler.noise.of_all_blocks(numbers)

    def sample(self, logits: ir.Value, places: list[int]) -> ir.Value:
        """logits [B,R,V] -> [B,R] int64: the tokens of rows whose tokens have these places."""
        sampler = self.tail.sampler
        return sampler.draw(sampler.weights(logits, len(places)), self.at(places), len(places))


@dataclass(frozen=True)
class ChainNoise:
    """Noise for the drafts of a chain, which have the `count` places after `before` [B,1]."""

    window: WindowNoise
    before: ir.Value
    count: int

    def of_all_blocks(self) -> RowNoise:
        tail, noise = self.window.tail, self.window.tail.sampler.noise
        places = tail.op("Add", self.before, tail.op.const(1 + np.arange(self.count)[None]))
        return noise.of_all_blocks(
            tail.pick_rows(self.window.numbers, places, self.window.count, noise.entries)
        )

    def of_row(self, j: int) -> RowNoise:
        """Return the noise of draft j alone."""
        every, split, sizes = self.of_all_blocks(), self.window.tail.op.split, [1] * self.count
        return RowNoise(
            split(every.blocks, sizes, axis=1)[j], split(every.tokens, sizes, axis=1)[j]
        )

    def of_candidates(self, blocks: ir.Value) -> list[RowNoise]:
        """Return the noise of every draft if only `blocks` [B,count,K] may be drawn."""
        noise = self.window.tail.sampler.noise
        return noise.of_candidates(
            self.window.numbers, self.window.count, self.before, blocks, self.count
        )
