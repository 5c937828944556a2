"""Rows read as more columns than they have channels, so that 8 bits are enough for a tensor with a few large channels.

A scale covers the largest magnitude, so a few channels that are larger than the rest would cost all others their
precision. Two things bring them down; the product computes the same:

- SmoothQuant's factors: a channel is divided, and its weights are multiplied (`pass_exporter.quantize.smooth`);
- outlier channel splitting (Zhao et al. 2019, arXiv 1901.09504): a channel is read by n columns with the same weights,
  each of which has an n-th of it. They round at places that are 1/n of a code apart, so their sum is n times as fine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pass_exporter.quantize.smooth import LEAST

EXPONENT = 0.2
"""Of SmoothQuant: the share of a channel's magnitude that goes to its weights."""
ADDED_COLUMNS = 96
"""Columns beside one for each channel. SmolLM2 needs them all, Qwen2.5-Coder-0.5B 64; each is one more to multiply."""
SCALE_MARGIN = 1.25
"""Other text has larger magnitudes than the text that was measured: 1.3 times as large in Wikipedia and Python."""
MAX_CODE = 126.5
"""The code of the largest magnitude, which an offset of less than 0.5 is added to."""


@dataclass(frozen=True)
class Columns:
    """How a product reads rows [...,in] as columns [...,n].

    divisor [in] float32: what a channel is divided by. copies [in] int64: the columns of a channel, which lie side by
    side. scale: of the columns' codes.
    """

    divisor: torch.Tensor
    copies: torch.Tensor
    scale: float

    @property
    def channels(self) -> torch.Tensor:
        """[n] int64: the channel that each column reads."""
        return torch.arange(len(self.copies)).repeat_interleave(self.copies)

    @property
    def factors(self) -> torch.Tensor:
        """[n] float32: what a column multiplies its channel by."""
        return (1 / (self.divisor * self.copies))[self.channels]

    @property
    def offsets(self) -> torch.Tensor:
        """[n] float32: what is added to a column before it is rounded. The sum over a channel's columns is 0."""
        return torch.cat([(torch.arange(count) + 0.5) / count - 0.5 for count in self.copies.tolist()]) * self.scale

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """The codes [...,n] float32 of rows [...,in]."""
        columns = rows.float()[..., self.channels] * self.factors + self.offsets
        return (columns / self.scale).round_().clamp_(-128, 127)

    def restored(self, codes: torch.Tensor) -> torch.Tensor:
        """The rows [...,in] that a product with these columns reads as `codes` [...,n]."""
        sums = torch.zeros(*codes.shape[:-1], len(self.copies)).index_add_(-1, self.channels, codes)
        return sums * self.scale * self.divisor


def split_columns(weight: torch.Tensor, maxima: torch.Tensor) -> Columns:
    """weight [out,in]: the product's. maxima [in]: the largest magnitude of each channel in some text."""
    magnitudes, largest = (values.float().clamp(min=LEAST) for values in (maxima, weight.abs().amax(0)))
    divisor = magnitudes**EXPONENT / largest ** (1 - EXPONENT)
    divisor /= divisor.median()
    copies, magnitudes = torch.ones(len(maxima), dtype=torch.int64), magnitudes / divisor
    for _ in range(ADDED_COLUMNS):
        copies[(magnitudes / copies).argmax()] += 1
    return Columns(divisor, copies, float((magnitudes / copies).max()) * SCALE_MARGIN / MAX_CODE)
