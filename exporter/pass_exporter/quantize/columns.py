"""Reduces outlier channels of the LM head's input, so that int8 codes with one scale suffice.

The scale must cover the largest magnitude, so a few large channels would leave few codes for the
values of all others. Two transformations reduce large channels and keep the product the same:

- SmoothQuant: a channel is divided by a factor, and its weights are multiplied by the factor
  (`pass_exporter.quantize.smooth`);
- outlier channel splitting (Zhao et al. 2019, arXiv 1901.09504): n columns with the same weights
  replace a channel, and each holds 1/n of it. Offsets shift the columns' rounding thresholds by 1/n
  of a code each, so that their sum has n times the resolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pass_exporter.quantize.smooth import MIN_MAGNITUDE

SMOOTHING_EXPONENT = 0.2
"""SmoothQuant's alpha (see quantize/smooth.py)."""
ADDED_COLUMNS = 96
"""How many more columns than channels there are; each enlarges the product. SmolLM2's perplexity
needs 96, Qwen2.5-Coder-0.5B's 64."""
SCALE_MARGIN = 1.25
"""The scale covers the measured maximum times this. Magnitudes in Wikipedia and Python were up to
1.3 times those of the calibration text."""
MAX_CODE = 126.5
"""The largest magnitude in units of a code, 127 less room for a column's offset (below 0.5)."""


@dataclass(frozen=True)
class ColumnSplit:
    """The transformation of rows [...,in] of channels to rows [...,n] of n columns.

    divisor [in] float32: the number that each channel is divided by.
    copies [in] int64: the number of columns of each channel, which are adjacent.
    scale: the static scale of the columns' codes.
    """

    divisor: torch.Tensor
    copies: torch.Tensor
    scale: float

    @property
    def channels(self) -> torch.Tensor:
        """The index [n] int64 of each column's channel."""
        return torch.arange(len(self.copies)).repeat_interleave(self.copies)

    @property
    def factors(self) -> torch.Tensor:
        """The numbers [n] float32 by which channels are multiplied to give the columns."""
        return (1 / (self.divisor * self.copies))[self.channels]

    @property
    def offsets(self) -> torch.Tensor:
        """The offsets [n] float32 that are added to columns before they are rounded. Those of a
        channel's columns sum to 0, so the product stays the same."""
        return (
            torch.cat([(torch.arange(count) + 0.5) / count - 0.5 for count in self.copies.tolist()])
            * self.scale
        )

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes [...,n], in float32, of rows [...,in]."""
        columns = rows.float()[..., self.channels] * self.factors + self.offsets
        return (columns / self.scale).round_().clamp_(-128, 127)

    def dequantized(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the rows [...,in] that `codes` [...,n] represent."""
        sums = torch.zeros(*codes.shape[:-1], len(self.copies)).index_add_(-1, self.channels, codes)
        return sums * self.scale * self.divisor


def split_columns(weight: torch.Tensor, maxima: torch.Tensor) -> ColumnSplit:
    """Choose the transformation for a weight [out,in].

    maxima [in]: the largest magnitude of each channel of its input. ADDED_COLUMNS go one by one to
    the channel whose columns are the largest.
    """
    magnitudes = maxima.float().clamp(min=MIN_MAGNITUDE)
    largest_weights = weight.abs().amax(0).float().clamp(min=MIN_MAGNITUDE)
    divisor = magnitudes**SMOOTHING_EXPONENT / largest_weights ** (1 - SMOOTHING_EXPONENT)
    divisor /= divisor.median()  # A common factor changes the scales, but no code.
    magnitudes = magnitudes / divisor
    copies = torch.ones(len(maxima), dtype=torch.int64)
    for _ in range(ADDED_COLUMNS):
        copies[(magnitudes / copies).argmax()] += 1
    largest_column = float((magnitudes / copies).max())
    return ColumnSplit(divisor, copies, largest_column * SCALE_MARGIN / MAX_CODE)
