"""Counts drafts that would be accepted, and the passes that a runtime would need for a text.

Nothing is decoded: drafts were made after every token (an *anchor*) of a text that the model wrote,
and are compared with the tokens that follow. A right draft is one that equals the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.measuring.real_use import (
    ALL_KINDS,
    KINDS,
    PassCounts,
    count_passes,
    split_at_loop,
)

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftCounts:
    """Counts over the anchors of texts. They can be added.

    tried[j]: the number of anchors after which all drafts before j were right and the text is long
    enough for draft j.
    right[j]: the number of these anchors after which draft j was right, too.
    two_pass, fused: the passes that a runtime needs for the texts in these modes.
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

    @classmethod
    def zero(cls, lookahead: int) -> DraftCounts:
        return cls((0,) * lookahead, (0,) * lookahead, PassCounts(), PassCounts())

    @property
    def places(self) -> int:
        """The number of anchors, which tables call places."""
        return self.tried[0]

    @property
    def conditional(self) -> list[float]:
        """Conditional acceptance [L]: how often draft j is right if all drafts before it are."""
        return [
            right / tried if tried else 0.0
            for right, tried in zip(self.right, self.tried, strict=True)
        ]

    @property
    def cumulative(self) -> list[float]:
        """Cumulative acceptance [L]: how often drafts 1..j are all right."""
        return list(accumulate(self.conditional, mul))

    @property
    def accepted(self) -> float:
        """The mean number of accepted drafts per anchor."""
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
    """The counts outside of loops and in loops, where a text repeats itself."""

    outside_loops: DraftCounts
    in_loops: DraftCounts

    def __add__(self, other: SplitCounts) -> SplitCounts:
        return SplitCounts(self.outside_loops + other.outside_loops, self.in_loops + other.in_loops)

    @property
    def loop_share(self) -> float:
        """The share of anchors in a loop."""
        places = self.outside_loops.places + self.in_loops.places
        return self.in_loops.places / places if places else 0.0

    def as_json(self) -> dict[str, Any]:
        loops = {"share": round(self.loop_share, 4)} | self.in_loops.as_json()
        return self.outside_loops.as_json() | {"looping": loops}


Report = dict[str, dict[str, SplitCounts]]
"""Counts by temperature (such as "0.8") and kind of prompt."""


def count_drafts(drafts: Ids, written: Sequence[int], tokens: int) -> SplitCounts:
    """Count the drafts of the answer `written` within its first `tokens` tokens.

    drafts [anchors,L]: row k has the drafts for written[k + 1:], made by the pass that writes
    written[k] as its last token.
    """
    rows = [right_in_row(row, written[k + 1 :]) for k, row in enumerate(drafts.tolist())]
    before_loop, in_loop = split_at_loop(written, tokens)
    return SplitCounts(
        _count(rows, drafts.shape[1], written, before_loop),
        _count(rows, drafts.shape[1], written, in_loop),
    )


def right_in_row(drafts: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Return whether each draft equals its token of `text`, up to the first wrong draft or the end
    of the text."""
    right = []
    for draft, token in zip(drafts, text, strict=False):
        right.append(draft == token)
        if draft != token:
            break
    return right


def _count(
    rows: Sequence[list[bool]], lookahead: int, written: Sequence[int], indices: range
) -> DraftCounts:
    """Count the drafts for written[k + 1] on if k + 1 is in `indices`, and the passes there.

    rows[k]: the result of `right_in_row` for these drafts.
    """
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
    """Yield how many tokens each pass of fused decoding writes, for a text of `length` tokens.

    The first pass has no drafts. Every later pass verifies the drafts that the pass before it made.
    accepted[k]: how many drafts are right of those that a pass made whose last token is token k.
    """
    yield 1
    begin = 1
    while begin - 1 < len(accepted) and begin < length:
        size = min(1 + accepted[begin - 1], length - begin)
        yield size
        begin += size


def two_pass_sizes(accepted: Sequence[int], length: int) -> Iterator[int]:
    """Yield how many tokens each pass of two-pass decoding writes. Arguments as in `fused_sizes`.

    A pass that writes one token and drafts alternates with a pass that verifies the drafts.
    """
    begin = 0
    while begin < length:
        yield 1
        if begin >= len(accepted) or begin + 1 >= length:
            return
        size = min(1 + accepted[begin], length - begin - 1)
        yield size
        begin += 1 + size


def by_kind(
    kinds: Sequence[str], counts: Sequence[SplitCounts], lookahead: int
) -> dict[str, SplitCounts]:
    """Return the sums of counts by kind of prompt, and over all kinds."""
    sums = {}
    for kind in (*KINDS, ALL_KINDS):
        chosen = [c for k, c in zip(kinds, counts, strict=True) if kind in (k, ALL_KINDS)]
        if chosen:
            zero = DraftCounts.zero(lookahead)
            sums[kind] = sum(chosen, SplitCounts(zero, zero))
    return sums


def report_as_json(report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        temperature: {kind: counts.as_json() for kind, counts in kinds.items()}
        for temperature, kinds in report.items()
    }
