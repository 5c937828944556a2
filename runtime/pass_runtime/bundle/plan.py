"""Plans: the static layout of a decoding window.

A window is a list of rows. Every row has a kind, a parent row and a depth (its distance from the root); the
attention mask and the positions follow from those three. Training, export and runtime all take their masks and
positions from here, so they cannot disagree.

    ar          root                             emits 1
    draft-L     root, look-ahead group at root   emits 1, leaves L drafts        (PaSS phase 1)
    verify-L    root, L drafts                   emits 1 + accepted              (PaSS phase 2)
    fused-L     root, L drafts, L+1 groups       emits 1 + accepted, leaves L drafts
    fused:4,2,1 root, 2 drafts, groups of those sizes after 0, 1 and 2 of them: fewer rows, fewer next drafts

Decoding runs a cycle of plans: `ar` and `fused` repeat one, `two-pass` alternates draft and verify.
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

    @property
    def draft_rows(self) -> npt.NDArray[np.int64]:
        """[D+1,D']: the row that drafts token j of the next window, which has D' drafts, where `a` drafts of this one
        were accepted; 0 where none does."""
        table = np.zeros((self.drafts + 1, self.next.drafts), np.int64)
        row = 1 + self.drafts
        for accepted, size in enumerate(self.groups):
            table[accepted, :size] = np.arange(row, row + size)
            row += size
        return table

    def left(self, accepted: int) -> int:
        """How many drafts a pass leaves for the next one where `accepted` of its own were."""
        return self.groups[accepted] if self.groups else 0

    @property
    def next(self) -> Plan:
        """The plan whose window its tail lays out."""
        if self.is_fused or self.width == 1:
            return self
        return verify_plan(self.groups[0]) if self.groups else draft_plan(self.drafts)

    @property
    def is_fused(self) -> bool:
        """Whether it drafts and verifies at once."""
        return self.drafts > 0 and bool(self.groups)

    @property
    def tail(self) -> str:
        """The name of its tail graphs: fused plans with equally many drafts share them, whatever their groups."""
        return f"fused-{self.drafts}" if self.is_fused else self.name

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


def fused_plan(groups: Sequence[int]) -> Plan:
    """Both passes in one. `groups[a]` is the number of drafts to leave where `a` drafts are accepted."""
    drafts = _checked(len(groups) - 1)
    if not all(0 <= size <= drafts for size in groups) or not groups[0]:
        raise PassError(
            f"fused:{','.join(map(str, groups))} has {drafts} draft rows, so the first group must have 1 to {drafts} "
            f"rows and the others 0 to {drafts}"
        )
    full = all(size == drafts for size in groups)
    return Plan(f"fused-{drafts}" if full else f"fused:{','.join(map(str, groups))}", drafts, tuple(groups))


MODES = ("ar", "two-pass", "fused")


@dataclass(frozen=True)
class Cycle:
    """A decoding mode: the plans that follow one another, then start again."""

    name: str
    plans: tuple[Plan, ...]

    @property
    def lookahead(self) -> int:
        return max((plan.drafts for plan in self.plans), default=0)

    def reach(self, first: Plan) -> int:
        """How far the passes from `first` to the end of a round write behind the root when no draft is accepted."""
        return max(i + plan.width for i, plan in enumerate(self.plans[self.plans.index(first) :]))

    def narrower(self) -> Cycle:
        """The same mode with one draft less; `ar` in the end."""
        drafts = self.lookahead - 1
        if drafts < 1 or self.name in MODES:
            return make_cycle(self.name, max(drafts, 0))
        return fused_cycle([min(size, drafts) for size in self.plans[0].groups[:-1]])


def make_cycle(mode: str, lookahead: int) -> Cycle:
    """`mode` is one of MODES, or `fused:` with a size for every group, which then decides the look-ahead by itself.

    Otherwise `lookahead` counts the drafts of a round; `ar` ignores it, and with 0 every mode is `ar`.
    """
    shape = mode.removeprefix("fused:")
    if shape != mode and lookahead > 0:
        return fused_cycle(_sizes(shape))
    if shape == mode and mode not in MODES:
        raise PassError(f"unknown plan {mode!r}: choose one of {', '.join(MODES)}, or fused:4,3,2,2,1 and the like")
    if mode == "ar" or lookahead == 0:
        return Cycle("ar", (ar_plan(),))
    if mode == "fused":
        return fused_cycle([lookahead] * (lookahead + 1))
    return Cycle(mode, (draft_plan(lookahead), verify_plan(lookahead)))


def fused_cycle(groups: Sequence[int]) -> Cycle:
    """Fused passes with these groups, one after another."""
    plan = fused_plan(groups)
    return Cycle("fused" if plan.name == plan.tail else plan.name, (plan,))


def _sizes(shape: str) -> list[int]:
    try:
        return [int(size) for size in shape.split(",")]
    except ValueError:
        raise PassError(f"fused:{shape} must list group sizes, as in fused:4,3,2,2,1") from None


def bundle_plans(lookahead: int) -> Sequence[Plan]:
    """Every plan that a bundle with `lookahead` rows has tails for."""
    lengths = range(1, lookahead + 1)
    return [ar_plan(), *(p for n in lengths for mode in ("two-pass", "fused") for p in make_cycle(mode, n).plans)]


def _checked(lookahead: int) -> int:
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise PassError(f"look-ahead must be 1 to {MAX_LOOKAHEAD}, not {lookahead}")
    return lookahead
