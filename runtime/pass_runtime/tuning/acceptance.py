"""How well drafts do: running averages, which start from what training measured."""

from __future__ import annotations

from collections.abc import Sequence

MEMORY = 200.0
"""Passes that an acceptance rate is averaged over."""
PRIOR_WEIGHT = 10.0


class Acceptance:
    """The rate at which draft i is accepted once those before it were."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._prior = list(prior)
        self._hits = [rate * PRIOR_WEIGHT for rate in prior]
        self._trials = [PRIOR_WEIGHT] * len(prior)

    @property
    def rates(self) -> list[float]:
        return [hits / trials for hits, trials in zip(self._hits, self._trials, strict=True)]

    def record(self, drafted: int, accepted: int) -> None:
        """One pass: `accepted` of `drafted` drafts. Old passes fade, towards nothing known."""
        drafted = min(drafted, len(self._prior))
        for i in range(min(accepted + 1, drafted)):
            self._hits[i] = (self._hits[i] + (i < accepted)) * (1 - 1 / MEMORY)
            self._trials[i] = (self._trials[i] + 1) * (1 - 1 / MEMORY)
        if drafted == accepted < len(self._prior):  # drafts that all survive make one more worth a try
            self._lean(drafted, self.rates[drafted - 1], 1 / MEMORY)

    def forget(self) -> None:
        """A pass without these drafts: drift slowly back to the prior, so that they are tried again one day."""
        for i, rate in enumerate(self._prior):
            self._lean(i, rate, 1 / (8 * MEMORY))

    def _lean(self, i: int, rate: float, share: float) -> None:
        self._hits[i] += (rate * self._trials[i] - self._hits[i]) * share
