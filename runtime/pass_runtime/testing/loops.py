"""Where a text begins to repeat itself: small models' greedy text does, and loops are easy to draft."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 48
REPEATS, AT_THE_END = 3, 2
"""Times that a period stands one after another in a loop; and where the text was cut off while it repeated itself."""
FEWEST = 24
"""Tokens in a loop, all repeats together: "no, no, no" is none."""


def loop_start(tokens: Sequence[int]) -> int | None:
    """The first index of `tokens` that belongs to a loop; None where there is none. What follows counts as looping,
    too: a small model hardly ever comes out again, and to count it would be kind.

    A loop is the same period of at most LONGEST_PERIOD tokens, REPEATS times in a row (AT_THE_END times at the end of
    the text), over at least FEWEST tokens. The first of the repeats is the model's own writing: the loop starts behind
    it.
    """
    starts = [start for period in range(1, LONGEST_PERIOD + 1) if (start := _repeats(tokens, period)) is not None]
    return min(starts, default=None)


def _repeats(tokens: Sequence[int], period: int) -> int | None:
    """Where the second of the first repeats of this period begins."""
    run, last = 0, len(tokens) - 1
    for i in range(period, len(tokens)):
        run = run + 1 if tokens[i] == tokens[i - period] else 0
        times = AT_THE_END if i == last else REPEATS
        if run >= max((times - 1) * period, FEWEST - period):
            return i - run + 1
    return None
