"""Plans: the static layout of a decoding window.

A window is a list of rows. Every row has a kind, a parent row and a depth (its distance from the root); the
attention mask and the positions follow from those three. Training, export and runtime all take their masks and
positions from here, so they cannot disagree.

    ar          root                             emits 1
    draft-L     root, look-ahead group at root   emits 1, leaves L drafts        (PaSS phase 1)
    verify-L    root, L drafts                   emits 1 + accepted              (PaSS phase 2)

Decoding runs a cycle of plans: `ar` repeats one, `two-pass` alternates draft and verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError

MAX_LOOKAHEAD = 16


class RowKind(Enum):
    """What stands in a row: the newest committed token, a drafted token, or a look-ahead embedding."""

    ROOT = "root"
    DRAFT = "draft"
    LOOKAHEAD = "lookahead"


@dataclass(frozen=True)
class Row:
    """One query row. `parent` is the index of the row it follows (-1 for the root)."""

    kind: RowKind
    parent: int
    depth: int


@dataclass(frozen=True)
class Plan:
    """A window layout: the root, `drafts` chained draft rows, and one look-ahead group per entry of `groups`.

    Group a follows the first a drafts (group 0 follows the root) and has `groups[a]` rows.
    """

    name: str
    drafts: int
    groups: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        rows = [Row(RowKind.ROOT, -1, 0)]
        rows += [Row(RowKind.DRAFT, i, i + 1) for i in range(self.drafts)]
        for prefix, size in enumerate(self.groups):
            parent = prefix
            for i in range(size):
                rows.append(Row(RowKind.LOOKAHEAD, parent, prefix + 1 + i))
                parent = len(rows) - 1
        return tuple(rows)

    @property
    def width(self) -> int:
        """Q, the number of query rows."""
        return len(self.rows)

    @property
    def max_emitted(self) -> int:
        """The most tokens one pass can emit: every draft and the bonus token."""
        return self.drafts + 1

    @property
    def row_position(self) -> npt.NDArray[np.int64]:
        """[Q] position of each row relative to the root's."""
        return np.array([row.depth for row in self.rows], np.int64)

    @property
    def window_mask(self) -> npt.NDArray[np.bool_]:
        """[Q,Q] bool: a row sees itself and its ancestors."""
        mask = np.eye(self.width, dtype=np.bool_)
        for i, row in enumerate(self.rows):
            if row.parent >= 0:
                mask[i] |= mask[row.parent]  # parents stand before their children
        return mask

    @property
    def logit_rows(self) -> npt.NDArray[np.int64]:
        """[R] rows that are sampled from: all of them."""
        return np.arange(self.width, dtype=np.int64)

    @property
    def lookahead_rows(self) -> npt.NDArray[np.int64]:
        """[A] the look-ahead rows, which are the window's last."""
        return np.arange(self.width - sum(self.groups), self.width, dtype=np.int64)

    def lookahead_ids(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """[sum(groups)] ids of the look-ahead rows, in row order: V+i is look-ahead embedding i."""
        return np.array([vocab_size + i for size in self.groups for i in range(size)], np.int64)


def ar_plan() -> Plan:
    """Plain autoregressive decoding: one row, one token."""
    return Plan("ar", 0, ())


def draft_plan(lookahead: int) -> Plan:
    """The paper's first pass: the root's own next token, and `lookahead` drafts after it."""
    return Plan(f"draft-{_checked(lookahead)}", 0, (lookahead,))


def verify_plan(lookahead: int) -> Plan:
    """The paper's second pass: `lookahead` drafts against the model's own choice."""
    return Plan(f"verify-{_checked(lookahead)}", lookahead, ())


def prefill_plan(width: int) -> Plan:
    """A chunk of `width` prompt tokens: a chain, of which nothing is sampled."""
    return Plan(f"prefill-{width}", width - 1, ())


@dataclass(frozen=True)
class Cycle:
    """A decoding mode: the plans that follow one another, then start again."""

    name: str
    plans: tuple[Plan, ...]

    @property
    def lookahead(self) -> int:
        return max((plan.drafts for plan in self.plans), default=0)

    def after(self, plan: Plan) -> Plan:
        return self.plans[(self.plans.index(plan) + 1) % len(self.plans)]


MODES = ("ar", "two-pass")


def make_cycle(mode: str, lookahead: int) -> Cycle:
    """`mode` is one of MODES; `lookahead` is ignored by `ar`, and `two-pass` with 0 is `ar`."""
    if mode not in MODES:
        raise PassError(f"unknown plan {mode!r}: choose one of {', '.join(MODES)}")
    if mode == "ar" or lookahead == 0:
        return Cycle("ar", (ar_plan(),))
    return Cycle(mode, (draft_plan(lookahead), verify_plan(lookahead)))


def bundle_plans(lookahead: int) -> Sequence[tuple[Plan, Plan]]:
    """Every plan a bundle with `lookahead` rows carries, each with the plan whose window its tail prepares."""
    pairs = [(ar_plan(), ar_plan())]
    for length in range(1, lookahead + 1):
        cycle = make_cycle("two-pass", length)
        pairs += [(plan, cycle.after(plan)) for plan in cycle.plans]
    return pairs


def _checked(lookahead: int) -> int:
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise PassError(f"look-ahead must be 1 to {MAX_LOOKAHEAD}, not {lookahead}")
    return lookahead
