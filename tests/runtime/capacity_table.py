"""Requests that reach the end of a small KV capacity, for the tests of Python and C++."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CAPACITIES = (4, 8, 12, 16, 32, 64)
BATCHES = (1, 2, 3)
PLANS = ("ar", "two-pass", "fused", "fused:3,1,0,2", "auto")
DRAFTS = ("lookahead", "ngram", "both")
LEFT = (0, 1, 2, 3)
"""Entries of the cache that the prompt leaves; 0 comes first, and must not spoil later requests."""
UNLIMITED = 1000
"""More tokens than any of the capacities."""


@dataclass(frozen=True)
class Case:
    """Requests with one plan and one source of drafts. prompts: the lengths of their prompts."""

    plan: str
    draft: str | None
    prompts: tuple[int, ...]


def cases(capacity: int, batch: int) -> Iterator[Case]:
    """Prompts that leave 0 to 3 entries, beside prompts of one token and of another length."""
    for left in LEFT:
        near = [max(1, capacity - entries) for entries in (left, (left + 2) % 4)]
        for plan in PLANS:
            for draft in DRAFTS if plan != "ar" else (None,):
                yield Case(plan, draft, (near[0], 1, near[1])[:batch])


def prompt_of(length: int) -> list[int]:
    """Tokens that repeat, so that n-grams are found."""
    return [5 + i % 3 for i in range(length)]


def texts_needed(capacity: int) -> Sequence[int]:
    """The lengths of all prompts of a capacity."""
    lengths = (case.prompts for batch in BATCHES for case in cases(capacity, batch))
    return sorted({length for prompts in lengths for length in prompts})
