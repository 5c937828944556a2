"""Where a text begins to loop. Greedy text of small models does, and loops are easy to draft."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 48
REPEATS, AT_THE_END = 3, 2
"""How often a period occurs in a row in a loop, and in a loop that the end of the text cuts off."""
FEWEST = 24
"""The fewest tokens of a loop, all repeats together: "no, no, no" is not a loop."""


def loop_start(tokens: Sequence[int]) -> int | None:
    """The first index of `tokens` that belongs to a loop; None where there is no loop. Everything after it counts as
    looping: a small model hardly ever leaves a loop, and tokens after one would flatter the drafts.

    A loop is a period of at most LONGEST_PERIOD tokens that occurs REPEATS times in a row (AT_THE_END times at the end
    of the text) and has at least FEWEST tokens in all. The loop starts after the first occurrence of its period.
    """
    starts = [start for period in range(1, LONGEST_PERIOD + 1) if (start := _repeats(tokens, period)) is not None]
    return min(starts, default=None)


def _repeats(tokens: Sequence[int], period: int) -> int | None:
    """The index at which the second occurrence of a repeated period of this length begins; None without repeats."""
    run, last = 0, len(tokens) - 1
    for i in range(period, len(tokens)):
        run = run + 1 if tokens[i] == tokens[i - period] else 0
        times = AT_THE_END if i == last else REPEATS
        if run >= max((times - 1) * period, FEWEST - period):
            return i - run + 1
    return None
