"""Plans, the layouts of windows, and cycles, the plans that the passes of a sequence use in turn.

A window is a list of rows. Every row has a kind, a parent (the row that it follows) and a depth
(its distance from the root); the attention mask and the positions follow from these. Training,
export and runtime all take their masks and positions from here, so they cannot disagree.

    ar          root                             emits 1
    draft-L     root, look-ahead group at root   emits 1, makes L drafts         (PaSS phase 1)
    verify-L    root, L drafts                   emits 1 + accepted              (PaSS phase 2)
    fused-L     root, L drafts, L+1 groups       emits 1 + accepted, makes L drafts
    fused:2,2,1 root, 2 drafts, groups of 2, 2 and 1 rows after 0, 1 and 2 drafts: fewer rows, fewer
                next drafts
    tree-N      as fused, with a tree of N drafts instead of a chain, and a group after the root and
                after each draft
    tree:2,2,1,0 a tree of 3 drafts, with the size of the root's group and of every draft's group

The cycle of the mode `two-pass` has a draft plan and a verify plan; every other cycle has one plan.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from pass_runtime.bundle.tree import TREE_SIZES, tree_depth, tree_parents, tree_sizes
from pass_runtime.errors import PassError

MAX_LOOKAHEAD = 16
"""The largest L of a bundle, and the most drafts of a window."""


class RowKind(Enum):
    """What the input of a row is: the text's newest token, a draft, or a look-ahead embedding."""

    ROOT = "root"
    DRAFT = "draft"
    LOOKAHEAD = "lookahead"


@dataclass(frozen=True)
class Row:
    """A query row. parent: the row that it follows, -1 for the root. depth: 0 for the root."""

    kind: RowKind
    parent: int
    depth: int


@dataclass(frozen=True)
class Plan:
    """The layout of a window: the root (row 0), then `drafts` draft rows, then the look-ahead rows.

    groups: the sizes of the look-ahead groups; group a follows row a, the root or a draft. parents:
    for each draft of a tree, the row that it follows. The first `depth` drafts of a tree are the
    chain of first choices. `parents` is empty if the drafts are a chain.
    """

    name: str
    drafts: int
    groups: tuple[int, ...]
    parents: tuple[int, ...] = ()

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """[Q] the rows in their order in the window."""
        rows = [Row(RowKind.ROOT, -1, 0)]
        for parent in self.parents or range(self.drafts):
            rows.append(Row(RowKind.DRAFT, parent, rows[parent].depth + 1))
        for parent, size in enumerate(self.groups):
            for _ in range(size):
                rows.append(Row(RowKind.LOOKAHEAD, parent, rows[parent].depth + 1))
                parent = len(rows) - 1
        return tuple(rows)

    @cached_property
    def depth(self) -> int:
        """The most drafts that one pass can accept."""
        return max(row.depth for row in self.rows[: 1 + self.drafts])

    @property
    def width(self) -> int:
        """Q, the number of query rows."""
        return len(self.rows)

    @property
    def max_emitted(self) -> int:
        """E, the most tokens that one pass can emit: accepted drafts and the bonus token."""
        return self.depth + 1

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
        """[D+1,L'], where L' is the depth of the next window's drafts. If row a holds the last
        accepted draft (the root, row 0, if none is accepted), entry (a, j) is the row whose logits
        give the next window's drafts at depth j + 1; 0 if group a has no such row."""
        table = np.zeros((self.drafts + 1, self.next.depth), np.int64)
        first = 1 + self.drafts
        for followed, size in enumerate(self.groups):
            table[followed, :size] = np.arange(first, first + size)
            first += size
        return table

    @property
    def paths(self) -> npt.NDArray[np.int64]:
        """[D+1,E] the path from the root to each draft: entry (a, j) is the row at depth j on the
        path to row a, and a itself where j is more than the depth of row a."""
        table = np.zeros((self.drafts + 1, self.max_emitted), np.int64)
        for row in range(1, self.drafts + 1):
            table[row] = table[self.rows[row].parent]
            table[row, self.rows[row].depth :] = row
        return table

    def next_draft_depth(self, last: int) -> int:
        """Return how deep the next drafts are if row `last` holds the last accepted draft."""
        return self.groups[last] if self.groups else 0

    @cached_property
    def next(self) -> Plan:
        """The plan whose window the tail of this plan lays out."""
        if self.is_fused or self.width == 1:
            return self  # A cycle of one plan.
        return verify_plan(self.groups[0]) if self.groups else draft_plan(self.drafts)

    @property
    def is_fused(self) -> bool:
        """Whether a pass both verifies drafts and makes the next ones."""
        return self.drafts > 0 and bool(self.groups)

    @property
    def tail(self) -> str:
        """The name of the tail graphs. All fused plans with the same number of drafts share theirs,
        whatever their groups are, and so do trees."""
        kind = "tree" if self.parents else "fused"
        return f"{kind}-{self.drafts}" if self.is_fused else self.name

    def lookahead_ids(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Return the look-ahead rows' ids [A]: `vocab_size` + i is look-ahead embedding i."""
        return np.array([vocab_size + i for size in self.groups for i in range(size)], np.int64)


@cache
def ar_plan() -> Plan:
    """Return the plan of plain decoding: one row, one token."""
    return Plan("ar", 0, ())


@cache
def draft_plan(lookahead: int) -> Plan:
    """Return the plan of the paper's first pass, which makes `lookahead` drafts."""
    return Plan(f"draft-{_checked_lookahead(lookahead)}", 0, (lookahead,))


@cache
def verify_plan(lookahead: int) -> Plan:
    """Return the plan of the paper's second pass, which verifies `lookahead` drafts."""
    return Plan(f"verify-{_checked_lookahead(lookahead)}", lookahead, ())


def prefill_plan(width: int) -> Plan:
    """Return the plan of a prompt chunk: a chain of `width` rows. Nothing is sampled."""
    return Plan(f"prefill-{width}", width - 1, ())


def fused_plan(groups: Sequence[int]) -> Plan:
    """Return the plan that verifies len(groups) - 1 drafts and makes the next ones in one pass.
    groups[a]: how many to make if `a` drafts are accepted. Raises PassError for other groups."""
    drafts = _checked_lookahead(len(groups) - 1)
    if not all(0 <= size <= drafts for size in groups) or not groups[0]:
        raise PassError(
            f"fused:{','.join(map(str, groups))} has {drafts} draft rows, so the first group must "
            f"have 1 to {drafts} rows and the others 0 to {drafts}"
        )
    all_full = all(size == drafts for size in groups)
    name = f"fused-{drafts}" if all_full else f"fused:{','.join(map(str, groups))}"
    return Plan(name, drafts, tuple(groups))


def tree_plan(groups: Sequence[int], lookahead: int) -> Plan:
    """Return the plan that verifies a tree of len(groups) - 1 drafts and makes the next tree, for a
    bundle with this look-ahead. groups[a]: how deep the next drafts are if row a holds the last
    accepted draft. Raises PassError if there is no such tree, or if a group is too large."""
    drafts = len(groups) - 1
    parents, depth = tree_parents(drafts, lookahead), tree_depth(drafts)
    if not all(0 <= size <= depth for size in groups) or not groups[0]:
        raise PassError(
            f"tree:{','.join(map(str, groups))} has drafts at most {depth} deep, so the first "
            f"group must have 1 to {depth} rows and the others 0 to {depth}"
        )
    all_full = all(size == depth for size in groups)
    name = f"tree-{drafts}" if all_full else f"tree:{','.join(map(str, groups))}"
    return Plan(name, drafts, tuple(groups), parents)


def full_tree(drafts: int, lookahead: int) -> Plan:
    """Return the plan of the tree of `drafts` drafts whose groups are all full."""
    return tree_plan([tree_depth(drafts)] * (drafts + 1), lookahead)


MODES = ("ar", "two-pass", "fused")
"""The modes whose plans are in every bundle."""
_TREE_NAME = re.compile(f"tree-({'|'.join(map(str, TREE_SIZES))})")


@dataclass(frozen=True)
class Cycle:
    """Plans that the passes of a sequence use in turn. name: its mode (see `make_cycle`)."""

    name: str
    plans: tuple[Plan, ...]

    @property
    def depth(self) -> int:
        """The most drafts that one pass can accept."""
        return max((plan.depth for plan in self.plans), default=0)

    @property
    def is_tree(self) -> bool:
        return bool(self.plans[0].parents)

    def reach(self, first: Plan) -> int:
        """Return how many cache entries after the text the passes from `first` to the cycle's end
        need if no draft is accepted: each window then begins one entry after the one before."""
        passes = self.plans[self.plans.index(first) :]
        return max(i + plan.width for i, plan in enumerate(passes))

    def narrower(self) -> Cycle:
        """Return the cycle of the same mode with one draft less, or `ar` if no draft is left. A
        tree becomes a chain of the same depth."""
        if self.is_tree:
            return make_cycle("fused", self.depth)
        drafts = self.depth - 1
        if drafts < 1 or self.name in MODES:
            return make_cycle(self.name, max(drafts, 0))
        return fused_cycle([min(size, drafts) for size in self.plans[0].groups[:-1]])


def make_cycle(mode: str, lookahead: int) -> Cycle:
    """Return the cycle of `mode`: one of MODES, `tree-N`, or `fused:` or `tree:` and the size of
    every group. Raises PassError for other modes.

    lookahead: how many drafts to make; for trees, the largest depth. 0 gives `ar` in every mode.
    `fused:` ignores other values, because its groups say how many drafts there are.
    """
    lists_sizes = mode.startswith(("fused:", "tree:"))
    if not lists_sizes and mode not in MODES and not _TREE_NAME.fullmatch(mode):
        sizes = ", ".join(f"tree-{size}" for size in TREE_SIZES)
        raise PassError(
            f"unknown plan {mode!r}: choose one of {', '.join(MODES)}, {sizes}, auto, or group "
            "sizes as in fused:4,3,2,2,1 and tree:2,2,1,0"
        )
    if mode == "ar" or lookahead == 0:
        return Cycle("ar", (ar_plan(),))
    if mode.startswith("fused:"):
        return fused_cycle(_sizes(mode))
    if mode.startswith("tree:"):
        return tree_cycle(_sizes(mode), lookahead)
    if mode.startswith("tree-"):
        return Cycle(mode, (full_tree(int(mode.removeprefix("tree-")), lookahead),))
    if mode == "fused":
        return fused_cycle([lookahead] * (lookahead + 1))
    return Cycle(mode, (draft_plan(lookahead), verify_plan(lookahead)))


def fused_cycle(groups: Sequence[int]) -> Cycle:
    """Return the cycle that repeats the fused plan with these groups."""
    plan = fused_plan(groups)
    all_full = plan.name == plan.tail  # The name then has no group sizes.
    return Cycle("fused" if all_full else plan.name, (plan,))


def tree_cycle(groups: Sequence[int], lookahead: int) -> Cycle:
    """Return the cycle that repeats the plan of a tree with these groups."""
    plan = tree_plan(groups, lookahead)
    return Cycle(plan.name, (plan,))


def _sizes(mode: str) -> list[int]:
    try:
        return [int(size) for size in mode.partition(":")[2].split(",")]
    except ValueError:
        raise PassError(
            f"{mode} must list group sizes, as in fused:4,3,2,2,1 and tree:2,2,1,0"
        ) from None


def bundle_plans(lookahead: int, *, trees: bool = False) -> Sequence[Plan]:
    """Return the plans for which a bundle has tails. trees: whether it has tails for trees."""
    lengths = range(1, lookahead + 1)
    chains = [
        ar_plan(),
        *(
            plan
            for length in lengths
            for mode in ("two-pass", "fused")
            for plan in make_cycle(mode, length).plans
        ),
    ]
    return [*chains, *(full_tree(size, lookahead) for size in tree_sizes(lookahead) if trees)]


def _checked_lookahead(lookahead: int) -> int:
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise PassError(f"look-ahead must be 1 to {MAX_LOOKAHEAD}, not {lookahead}")
    return lookahead
