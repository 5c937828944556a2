"""A table of requests that reach the end of a small KV capacity, with every plan and every source
of drafts. The Python runtime and the C++ runtime are both tested with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CAPACITIES = (4, 8, 12, 16, 32, 64)
BATCHES = (1, 2, 3)
PLANS = ("ar", "two-pass", "fused", "fused:3,1,0,2", "auto")
DRAFTS = ("lookahead", "ngram", "both")
FREE_ENTRIES = (0, 1, 2, 3)
"""Entries of the cache that the longest prompt leaves free. 0 comes first, so that what it might
spoil shows in later requests."""
UNLIMITED = 1000
"""A number of new tokens that is larger than any of the capacities."""


@dataclass(frozen=True)
class Case:
    """Requests that are decoded side by side, all with one plan and one source of drafts."""

    plan: str
    draft: str | None
    prompt_lengths: tuple[int, ...]


def cases(capacity: int, batch: int) -> Iterator[Case]:
    """Yield cases of `batch` requests: the first prompt leaves few entries free, the second is one
    token, and the third leaves another small number of entries free."""
    for free in FREE_ENTRIES:
        first, third = (max(1, capacity - entries) for entries in (free, (free + 2) % 4))
        for plan in PLANS:
            for draft in DRAFTS if plan != "ar" else (None,):
                yield Case(plan, draft, (first, 1, third)[:batch])


def prompt_of(length: int) -> list[int]:
    """Return `length` token ids that repeat, so that there are n-gram drafts."""
    return [5 + i % 3 for i in range(length)]


def texts_needed(capacity: int) -> Sequence[int]:
    """Return the lengths of all prompts of the cases of a capacity, each once."""
    lengths = (case.prompt_lengths for batch in BATCHES for case in cases(capacity, batch))
    return sorted({length for of_case in lengths for length in of_case})
