"""Reduces outlier channels of the LM head's input, so that 8 bits with one scale are enough for it.

The scale must cover the largest magnitude, so a few large channels would leave all others few
codes. Two transformations reduce these channels without changing the product:

- SmoothQuant: a channel is divided by a factor, and its weights are multiplied
  (`pass_exporter.quantize.smooth`);
- outlier channel splitting (Zhao et al. 2019, arXiv 1901.09504): n columns with the same weights
  replace a channel, and each holds 1/n of it. Their rounding thresholds are 1/n of a code apart, so
  their sum has n times the resolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pass_exporter.quantize.smooth import MIN_MAGNITUDE

SMOOTHING_EXPONENT = 0.2
"""SmoothQuant's alpha: the share of a channel's magnitude that moves to its weights."""
ADDED_COLUMNS = 96
"""Columns beyond one per channel; each enlarges the product. SmolLM2's perplexity needs 96,
Qwen2.5-Coder-0.5B's 64."""
SCALE_MARGIN = 1.25
"""The scale leaves this much room above the measured maximum. Magnitudes in Wikipedia and Python
were up to 1.3 times those of the calibration text."""
MAX_CODE = 126.5
"""The largest magnitude before an offset of less than 0.5 is added, in units of a code."""


@dataclass(frozen=True)
class ColumnSplit:
    """The transformation of rows [...,in] to columns [...,n].

    divisor [in] float32: the number that each channel is divided by.
    copies [in] int64: the number of columns of each channel; they are adjacent.
    scale: the static scale of the columns' codes.
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
        """[n] float32: the number that each column's channel is multiplied by."""
        return (1 / (self.divisor * self.copies))[self.channels]

    @property
    def offsets(self) -> torch.Tensor:
        """[n] float32: the offset added to each column before it is rounded. A channel's sum is
        0."""
        return (
            torch.cat([(torch.arange(count) + 0.5) / count - 0.5 for count in self.copies.tolist()])
            * self.scale
        )

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes [...,n] float32 of rows [...,in]."""
        columns = rows.float()[..., self.channels] * self.factors + self.offsets
        return (columns / self.scale).round_().clamp_(-128, 127)

    def dequantized(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the rows [...,in] that `codes` [...,n] represent."""
        sums = torch.zeros(*codes.shape[:-1], len(self.copies)).index_add_(-1, self.channels, codes)
        return sums * self.scale * self.divisor


def split_columns(weight: torch.Tensor, maxima: torch.Tensor) -> ColumnSplit:
    """Choose divisors and copies. weight [out,in]. maxima [in]: the channels' largest values."""
    magnitudes, largest = (
        values.float().clamp(min=MIN_MAGNITUDE) for values in (maxima, weight.abs().amax(0))
    )
    divisor = magnitudes**SMOOTHING_EXPONENT / largest ** (1 - SMOOTHING_EXPONENT)
    divisor /= divisor.median()
    copies, magnitudes = torch.ones(len(maxima), dtype=torch.int64), magnitudes / divisor
    for _ in range(ADDED_COLUMNS):
        copies[(magnitudes / copies).argmax()] += 1
    return ColumnSplit(
        divisor, copies, float((magnitudes / copies).max()) * SCALE_MARGIN / MAX_CODE
    )
