"""Counts the drafts after each token (an *anchor*) of the model's text that equal it, and the
passes that a runtime would need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, mul
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.measuring.real_use import (
    ALL_KINDS,
    ALL_NAMES,
    PassCounts,
    count_passes,
    split_at_loop,
)

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftCounts:
    """Counts over the anchors of texts.

    tried[j]: anchors after which all drafts before j were right and the text has room for draft j.
    right[j]: those after which draft j was right, too. two_pass, fused: passes by these plans.
    """

    tried: tuple[int, ...]
    right: tuple[int, ...]
    two_pass: PassCounts
    fused: PassCounts

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            tuple(map(add, self.tried, other.tried)),
            tuple(map(add, self.right, other.right)),
            self.two_pass + other.two_pass,
            self.fused + other.fused,
        )

    @property
    def places(self) -> int:
        return self.tried[0]

    @property
    def conditional(self) -> list[float]:
        """How often draft j is right if all drafts before it are [L]."""
        return [
            right / tried if tried else 0.0
            for right, tried in zip(self.right, self.tried, strict=True)
        ]

    @property
    def cumulative(self) -> list[float]:
        """How often drafts 1..j are all right [L]."""
        return list(accumulate(self.conditional, mul))

    @property
    def accepted(self) -> float:
        """Accepted drafts per anchor."""
        return sum(self.cumulative)

    def as_json(self) -> dict[str, Any]:
        return {
            "places": self.places,
            "survival": [round(value, 4) for value in self.conditional],
            "chain": [round(value, 4) for value in self.cumulative],
            "accepted": round(self.accepted, 4),
            "tau": {"two-pass": round(self.two_pass.tau, 4), "fused": round(self.fused.tau, 4)},
            "passes": {"two-pass": self.two_pass.passes, "fused": self.fused.passes},
        }


@dataclass(frozen=True)
class SplitCounts:
    outside_loops: DraftCounts
    in_loops: DraftCounts

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(self.outside_loops + other.outside_loops, self.in_loops + other.in_loops)

    @property
    def loop_share(self) -> float:
        places = self.outside_loops.places + self.in_loops.places
        return self.in_loops.places / places if places else 0.0

    def as_json(self) -> dict[str, Any]:
        loops = {"share": round(self.loop_share, 4)} | self.in_loops.as_json()
        return self.outside_loops.as_json() | {"looping": loops}


Report = dict[str, dict[str, SplitCounts]]
"""Counts by temperature (such as "0.8") and kind of prompt."""


def count_drafts(drafts: Ids, written: Sequence[int], tokens: int) -> SplitCounts:
    """Count the drafts for the first `tokens` tokens of the answer `written`. drafts [anchors,L]:
    row k has those for written[k + 1:]."""
    rows = [right_in_row(row, written[k + 1 :]) for k, row in enumerate(drafts.tolist())]
    before_loop, in_loop = split_at_loop(written, tokens)
    return SplitCounts(
        _count(rows, drafts.shape[1], written, before_loop),
        _count(rows, drafts.shape[1], written, in_loop),
    )


def right_in_row(drafts: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Return whether each draft equals its token, up to the first wrong one or the text's end."""
    right = []
    for draft, token in zip(drafts, text, strict=False):
        right.append(draft == token)
        if draft != token:
            break
    return right


def _count(
    rows: Sequence[list[bool]], lookahead: int, written: Sequence[int], indices: range
) -> DraftCounts:
    """rows[k]: `right_in_row` of drafts for written[k + 1:], counted if k + 1 is in `indices`."""
    tried, right = [0] * lookahead, [0] * lookahead
    for k, row in enumerate(rows):
        if k + 1 in indices:
            for j, is_right in enumerate(row):
                tried[j] += 1
                right[j] += is_right
    accepted = [sum(row) for row in rows]
    two_pass = count_passes(two_pass_sizes(accepted, len(written)), indices)
    fused = count_passes(fused_sizes(accepted, len(written)), indices)
    return DraftCounts(tuple(tried), tuple(right), two_pass, fused)


def fused_sizes(accepted: Sequence[int], length: int) -> Iterator[int]:
    """Yield how many of a text's `length` tokens each pass of `fused` writes. Each verifies the
    drafts of the pass before. accepted[k]: right drafts after token k."""
    yield 1
    begin = 1
    while begin - 1 < len(accepted) and begin < length:
        size = min(1 + accepted[begin - 1], length - begin)
        yield size
        begin += size


def two_pass_sizes(accepted: Sequence[int], length: int) -> Iterator[int]:
    """As `fused_sizes`: a pass that writes one token and drafts alternates with one that
    verifies."""
    begin = 0
    while begin < length:
        yield 1
        if begin >= len(accepted) or begin + 1 >= length:
            return
        size = min(1 + accepted[begin], length - begin - 1)
        yield size
        begin += 1 + size


def by_kind(kinds: Sequence[str], counts: Sequence[SplitCounts]) -> dict[str, SplitCounts]:
    sums = {}
    for kind in (*ALL_NAMES, ALL_KINDS):
        chosen = [c for k, c in zip(kinds, counts, strict=True) if kind in (k, ALL_KINDS)]
        if chosen:
            sums[kind] = reduce(add, chosen)
    return sums


def report_as_json(report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        temperature: {kind: counts.as_json() for kind, counts in kinds.items()}
        for temperature, kinds in report.items()
    }
