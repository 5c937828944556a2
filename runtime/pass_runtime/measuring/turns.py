"""Measurements that take turns, so that a noisy machine affects all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from pass_runtime.backends.base import PassKind
from pass_runtime.decode.runner import Runner

Name = TypeVar("Name")
Result = TypeVar("Result")

SETTLING, PASSES = 2, 10
"""How many passes are run before some are timed, and how many are timed."""


def in_turns(calls: Mapping[Name, Callable[[], Result]], rounds: int) -> Iterator[dict[Name, list[Result]]]:
    """Run every call once in each round, and yield the results of all rounds so far after each of them.

    The results of one round before the first, which warms up, are left out.
    """
    found: dict[Name, list[Result]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            result = call()
            if number:
                found[name].append(result)
        if number:
            yield found


def pass_seconds(runner: Runner, kind: PassKind, *, tail: bool = True) -> tuple[float, float]:
    """Return the seconds of trunk and tail of a pass over idle slots: medians of PASSES consecutive passes.

    Passes of one kind follow one another while decoding, too, in one thread. The first one after another kind or in
    another thread takes longer, so such passes are not timed. tail: as for `Runner.idle_pass`.
    """
    times = [runner.idle_pass(kind, tail=tail) for _ in range(SETTLING + PASSES)][SETTLING:]
    trunks, tails = zip(*times, strict=True)
    return statistics.median(trunks), statistics.median(tails)
