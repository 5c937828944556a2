"""Conditional acceptance of drafts: running averages, which start from the rates that training measured."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MEMORY = 200.0
"""The number of passes that an acceptance rate is averaged over."""
PRIOR_WEIGHT = 10.0
"""The number of passes that the first rates count for, where nobody says otherwise."""

FORCED = -1
"""What stands for the length of an n-gram's match where a grammar leaves no choice of drafts."""


def cumulative_of(rates: Sequence[float]) -> Floats:
    """[L] conditional acceptance -> [L+1] cumulative: the probabilities that the first i drafts are all accepted."""
    cumulative: Floats = np.cumprod(np.array([1.0, *rates]))
    return cumulative


class ConditionalAcceptance:
    """By position i: the rate at which draft i is accepted where all drafts before it were."""

    def __init__(self, prior: Sequence[float], weight: float = PRIOR_WEIGHT) -> None:
        self._prior = list(prior)
        self._hits = [rate * weight for rate in prior]
        self._trials = [weight] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """Count one pass that accepted `accepted` of `drafted` drafts. The weight of older passes fades."""
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / MEMORY)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / MEMORY)
        if drafted == accepted < len(self._prior):  # where all drafts were accepted, the next one is likelier to be
            self._pull(drafted, self.rates[drafted - 1], 1 / MEMORY)

    def forget(self) -> None:
        """Count a pass without such drafts: the rates drift slowly back to the first ones, so that drafts are tried
        again."""
        for i, rate in enumerate(self._prior):
            self._pull(i, rate, 1 / (8 * MEMORY))

    def _pull(self, i: int, rate: float, share: float) -> None:
        """Move rate i towards `rate` by this share of the difference."""
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share
