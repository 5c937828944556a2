"""Measurements that take turns, so that a noisy machine affects all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

Name = TypeVar("Name")
Result = TypeVar("Result")


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
