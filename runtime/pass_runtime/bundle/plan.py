"""Plans: the static layout of a decoding window.

A window is a list of rows. Every row has a kind, a parent row and a depth, its distance from the root. The attention
mask and the positions follow from these. Training, export and runtime all take their masks and positions from here, so
they cannot disagree.

    ar          root                             emits 1
    draft-L     root, look-ahead group at root   emits 1, leaves L drafts        (PaSS phase 1)
    verify-L    root, L drafts                   emits 1 + accepted              (PaSS phase 2)
    fused-L     root, L drafts, L+1 groups       emits 1 + accepted, leaves L drafts
    fused:4,2,1 root, 2 drafts, groups of 4, 2 and 1 rows after 0, 1 and 2 drafts: fewer rows, fewer next drafts

Decoding runs a cycle of plans: `ar` and `fused` repeat one, `two-pass` alternates draft and verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from pass_runtime.errors import PassError

MAX_LOOKAHEAD = 16


class RowKind(Enum):
    """What a row holds: the newest committed token, a draft, or a look-ahead embedding."""

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
                mask[i] |= mask[row.parent]  # A parent's row comes before its children's rows.
        return mask

    @property
    def logit_rows(self) -> npt.NDArray[np.int64]:
        """[R] the rows whose logits are computed: all rows."""
        return np.arange(self.width, dtype=np.int64)

    @property
    def lookahead_rows(self) -> npt.NDArray[np.int64]:
        """[A] the look-ahead rows, which are the last rows of the window."""
        return np.arange(self.width - sum(self.groups), self.width, dtype=np.int64)

    @property
    def draft_rows(self) -> npt.NDArray[np.int64]:
        """[D+1,D'], where D' is the number of drafts in the next window. Entry (a, j) is the row whose logits give
        draft j of the next window when `a` drafts of this one were accepted; 0 where no row does."""
        table = np.zeros((self.drafts + 1, self.next.drafts), np.int64)
        row = 1 + self.drafts
        for accepted, size in enumerate(self.groups):
            table[accepted, :size] = np.arange(row, row + size)
            row += size
        return table

    def left(self, accepted: int) -> int:
        """How many drafts a pass leaves for the next pass when `accepted` of its own drafts were accepted."""
        return self.groups[accepted] if self.groups else 0

    @cached_property
    def next(self) -> Plan:
        """The plan whose window the tail of this plan lays out."""
        if self.is_fused or self.width == 1:
            return self
        return verify_plan(self.groups[0]) if self.groups else draft_plan(self.drafts)

    @property
    def is_fused(self) -> bool:
        """Whether a pass both verifies drafts and makes the next ones."""
        return self.drafts > 0 and bool(self.groups)

    @property
    def tail(self) -> str:
        """The name of this plan's tail graphs. Fused plans with the same number of drafts share them."""
        return f"fused-{self.drafts}" if self.is_fused else self.name

    def lookahead_ids(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """[sum(groups)] ids of the look-ahead rows, in row order: V+i is look-ahead embedding i."""
        return np.array([vocab_size + i for size in self.groups for i in range(size)], np.int64)


@cache
def ar_plan() -> Plan:
    """Plain autoregressive decoding: one row, one token."""
    return Plan("ar", 0, ())


@cache
def draft_plan(lookahead: int) -> Plan:
    """The first pass of the paper: it emits the token after the root, and makes `lookahead` drafts after that."""
    return Plan(f"draft-{_checked(lookahead)}", 0, (lookahead,))


@cache
def verify_plan(lookahead: int) -> Plan:
    """The second pass of the paper: it verifies `lookahead` drafts."""
    return Plan(f"verify-{_checked(lookahead)}", lookahead, ())


def prefill_plan(width: int) -> Plan:
    """A chunk of `width` prompt tokens, in a chain of rows. Nothing is sampled."""
    return Plan(f"prefill-{width}", width - 1, ())


def fused_plan(groups: Sequence[int]) -> Plan:
    """Both passes in one. `groups[a]` is the number of drafts to make for the case that `a` drafts are accepted."""
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
    """A decoding mode: plans that follow one another and then start again."""

    name: str
    plans: tuple[Plan, ...]

    @property
    def lookahead(self) -> int:
        return max((plan.drafts for plan in self.plans), default=0)

    def reach(self, first: Plan) -> int:
        """How many cache entries the passes from `first` to the end of the cycle write when no draft is accepted."""
        return max(i + plan.width for i, plan in enumerate(self.plans[self.plans.index(first) :]))

    def narrower(self) -> Cycle:
        """The same mode with one draft less, and at last `ar`."""
        drafts = self.lookahead - 1
        if drafts < 1 or self.name in MODES:
            return make_cycle(self.name, max(drafts, 0))
        return fused_cycle([min(size, drafts) for size in self.plans[0].groups[:-1]])


def make_cycle(mode: str, lookahead: int) -> Cycle:
    """The cycle of `mode`, which is one of MODES, or `fused:` and the size of every group.

    lookahead: the number of drafts. `ar` ignores it, with 0 every mode is `ar`, and else group sizes decide it.
    """
    shape = mode.removeprefix("fused:")
    if shape != mode and lookahead > 0:
        return fused_cycle(_sizes(shape))
    if shape == mode and mode not in MODES:
        raise PassError(f"unknown plan {mode!r}: choose one of {', '.join(MODES)}, auto, or fused:4,3,2,2,1 and so on")
    if mode == "ar" or lookahead == 0:
        return Cycle("ar", (ar_plan(),))
    if mode == "fused":
        return fused_cycle([lookahead] * (lookahead + 1))
    return Cycle(mode, (draft_plan(lookahead), verify_plan(lookahead)))


def fused_cycle(groups: Sequence[int]) -> Cycle:
    """The cycle that repeats one fused pass with these groups."""
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
