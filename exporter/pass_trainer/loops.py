"""Where a text begins to repeat itself: small models' greedy text does, and loops are easy to draft."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 48
REPEATS = 3
"""Times that a period stands one after another in a loop."""
FEWEST = 24
"""Tokens in a loop, all repeats together: "no, no, no" is none."""


def loop_start(tokens: Sequence[int]) -> int | None:
    """The first index of `tokens` from which on they repeat with one period; None where they do not loop.

    That is the first place where the same period of at most LONGEST_PERIOD tokens stands REPEATS times in a row, and
    over at least FEWEST tokens. The first of the repeats is the model's own writing: the loop starts behind it.
    """
    best: int | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        start = _repeats(tokens, period)
        if start is not None and (best is None or start < best):
            best = start
    return best


def _repeats(tokens: Sequence[int], period: int) -> int | None:
    """Where the second of the first repeats of this period begins."""
    wanted = max((REPEATS - 1) * period, FEWEST - period)
    run = 0
    for i in range(period, len(tokens)):
        run = run + 1 if tokens[i] == tokens[i - period] else 0
        if run == wanted:
            return i - wanted + 1
    return None
