"""How often drafts survive, and the tokens per pass that follow: counts over places of texts, which add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from pass_runtime.testing.real_use import ALL, KINDS, Passes, count_passes, stretches

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Figures:
    """Over places where drafts were made.

    tried[j]: places where the drafts before j were right, and the text has a token to compare draft j with. right[j]:
    those of them where j was right, too. two_pass, fused: passes that a runtime needs for these texts.
    """

    tried: tuple[int, ...]
    right: tuple[int, ...]
    two_pass: Passes
    fused: Passes

    def __add__(self, other: Figures) -> Figures:
        tried, right = (
            tuple(a + b for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in ((self.tried, other.tried), (self.right, other.right))
        )
        return Figures(tried, right, self.two_pass + other.two_pass, self.fused + other.fused)

    @classmethod
    def none(cls, lookahead: int) -> Figures:
        return cls((0,) * lookahead, (0,) * lookahead, Passes(), Passes())

    @property
    def places(self) -> int:
        return self.tried[0]

    @property
    def survival(self) -> list[float]:
        """[L]: the rate at which draft j survives where those before it did."""
        return [right / tried if tried else 0.0 for right, tried in zip(self.right, self.tried, strict=True)]

    @property
    def chain(self) -> list[float]:
        """[L]: the rate at which drafts 1..j are all right."""
        return list(accumulate(self.survival, mul))

    @property
    def accepted(self) -> float:
        """Drafts right in a row, on average."""
        return sum(self.chain)

    def as_json(self) -> dict[str, Any]:
        return {
            "places": self.places,
            "survival": [round(value, 4) for value in self.survival],
            "chain": [round(value, 4) for value in self.chain],
            "accepted": round(self.accepted, 4),
            "tau": {"two-pass": round(self.two_pass.tau, 4), "fused": round(self.fused.tau, 4)},
            "passes": {"two-pass": self.two_pass.passes, "fused": self.fused.passes},
        }


@dataclass(frozen=True)
class Found:
    """Figures of the places that count, and of those in a loop."""

    main: Figures
    looping: Figures

    def __add__(self, other: Found) -> Found:
        return Found(self.main + other.main, self.looping + other.looping)

    @property
    def share(self) -> float:
        """Of places in a loop."""
        places = self.main.places + self.looping.places
        return self.looping.places / places if places else 0.0

    def as_json(self) -> dict[str, Any]:
        return self.main.as_json() | {"looping": {"share": round(self.share, 4)} | self.looping.as_json()}


Report = dict[str, dict[str, Found]]
"""By temperature ("0", "0.8") and kind."""


def found_in(drafts: Ids, written: Sequence[int], tokens: int) -> Found:
    """drafts[k] [places,L] are those for written[k + 1:], made when written[k] was known; the first `tokens` count."""
    rows = [survivors(row, written[k + 1 :]) for k, row in enumerate(drafts.tolist())]
    main, looping = (_figures(rows, drafts.shape[1], written, where) for where in stretches(written, tokens))
    return Found(main, looping)


def survivors(drafts: Sequence[int], text: Sequence[int]) -> list[bool]:
    """Whether each draft is right, up to the first that is not, and not beyond the text."""
    found = []
    for draft, token in zip(drafts, text, strict=False):
        found.append(draft == token)
        if draft != token:
            break
    return found


def _figures(rows: Sequence[list[bool]], lookahead: int, written: Sequence[int], where: range) -> Figures:
    tried, right = [0] * lookahead, [0] * lookahead
    for k, row in enumerate(rows):
        if k + 1 in where:
            for j, survived in enumerate(row):
                tried[j] += 1
                right[j] += survived
    accepted = [sum(row) for row in rows]
    two_pass, fused = (count_passes(sizes(accepted, len(written)), where) for sizes in (two_pass_sizes, fused_sizes))
    return Figures(tuple(tried), tuple(right), two_pass, fused)


def fused_sizes(accepted: Sequence[int], length: int) -> Iterator[int]:
    """Tokens of each pass over a text of `length` tokens; accepted[k]: drafts right behind token k.

    The first pass has no drafts yet; every other one verifies what the one before left behind its last token but one.
    """
    yield 1
    begin = 1
    while begin - 1 < len(accepted) and begin < length:
        size = min(1 + accepted[begin - 1], length - begin)
        yield size
        begin += size


def two_pass_sizes(accepted: Sequence[int], length: int) -> Iterator[int]:
    """The same where a pass that drafts, and writes one token, and one that verifies take turns."""
    begin = 0
    while begin < length:
        yield 1
        if begin >= len(accepted) or begin + 1 >= length:
            return
        size = min(1 + accepted[begin], length - begin - 1)
        yield size
        begin += 1 + size


def by_kind(kinds: Sequence[str], found: Sequence[Found], lookahead: int) -> dict[str, Found]:
    """Sums over texts, by the kind of each and of all."""
    sums = {}
    for kind in (*KINDS, ALL):
        chosen = [f for k, f in zip(kinds, found, strict=True) if kind in (k, ALL)]
        if chosen:
            sums[kind] = sum(chosen, Found(Figures.none(lookahead), Figures.none(lookahead)))
    return sums


def in_json(report: Report) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        temperature: {kind: found.as_json() for kind, found in kinds.items()} for temperature, kinds in report.items()
    }
