"""Windows: the rows of one pass, what each row sees, and the window that follows.

    ar          root                             emits 1
    draft-L     root, look-ahead group at root   emits 1, makes L drafts         (PaSS phase 1)
    verify-L    root, L drafts                   emits 1 + accepted              (PaSS phase 2)
    copy-N      root, N copied drafts            emits 1 + accepted
    fused-L     root, L drafts, L+1 groups       emits 1 + accepted, makes L drafts
    fused:2,2,1 root, 2 drafts, groups of 2, 2 and 1 rows after 0, 1 and 2 drafts

Training, export and runtime take masks from here.
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
"""The largest L of a bundle, and the most drafts of a window."""
COPY_DRAFTS = (8, MAX_LOOKAHEAD)
"""The drafts of windows for long copies."""


class RowKind(Enum):
    ROOT = "root"
    DRAFT = "draft"
    LOOKAHEAD = "lookahead"


@dataclass(frozen=True)
class Row:
    """parent: the row that it follows, -1 for the root. depth: its distance from the root."""

    kind: RowKind
    parent: int
    depth: int


@dataclass(frozen=True)
class Window:
    """The root, then a chain of `drafts` rows, then look-ahead rows. groups: how many follow the
    root and each draft."""

    name: str
    drafts: int
    groups: tuple[int, ...]

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        rows = [Row(RowKind.ROOT, -1, 0)]
        rows += [Row(RowKind.DRAFT, draft, draft + 1) for draft in range(self.drafts)]
        for parent, size in enumerate(self.groups):
            for _ in range(size):
                rows.append(Row(RowKind.LOOKAHEAD, parent, rows[parent].depth + 1))
                parent = len(rows) - 1
        return tuple(rows)

    @cached_property
    def width(self) -> int:
        """Q, the number of rows."""
        return 1 + self.drafts + sum(self.groups)

    @cached_property
    def max_emitted(self) -> int:
        """E: accepted drafts and the bonus token."""
        return self.drafts + 1

    @property
    def row_position(self) -> npt.NDArray[np.int64]:
        """[Q] relative to the root."""
        return np.array([row.depth for row in self.rows], np.int64)

    @property
    def window_mask(self) -> npt.NDArray[np.bool_]:
        """[Q,Q] bool: a row sees itself and its ancestors."""
        mask = np.eye(self.width, dtype=np.bool_)
        for i, row in enumerate(self.rows):
            if row.parent >= 0:
                mask[i] |= mask[row.parent]  # parents come first
        return mask

    @property
    def logit_rows(self) -> npt.NDArray[np.int64]:
        """[R] the rows whose logits are computed: all."""
        return np.arange(self.width, dtype=np.int64)

    @property
    def lookahead_rows(self) -> npt.NDArray[np.int64]:
        """[A] the last rows of the window."""
        return np.arange(1 + self.drafts, self.width, dtype=np.int64)

    @property
    def draft_rows(self) -> npt.NDArray[np.int64]:
        """[D+1,L']: the rows that make the next L' drafts after 0 to D accepted ones."""
        table = np.zeros((self.drafts + 1, self.next.drafts), np.int64)
        first = 1 + self.drafts
        for followed, size in enumerate(self.groups):
            table[followed, :size] = np.arange(first, first + size)
            first += size
        return table

    def next_drafts(self, accepted: int) -> int:
        return self.groups[accepted] if self.groups else 0

    @cached_property
    def next(self) -> Window:
        """The window that this one's tail lays out."""
        if self.is_fused or self.width == 1:
            return self
        if self.groups:
            return verify_window(self.groups[0])
        return ar_window() if self.name.startswith("copy-") else draft_window(self.drafts)

    @property
    def is_fused(self) -> bool:
        return self.drafts > 0 and bool(self.groups)

    @property
    def tail(self) -> str:
        return f"fused-{self.drafts}" if self.is_fused else self.name

    def lookahead_ids(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """[A]: `vocab_size` + i is look-ahead embedding i."""
        return np.array([vocab_size + i for size in self.groups for i in range(size)], np.int64)


@cache
def ar_window() -> Window:
    return Window("ar", 0, ())


@cache
def draft_window(lookahead: int) -> Window:
    """The paper's first pass, which makes `lookahead` drafts."""
    return Window(f"draft-{_checked_lookahead(lookahead)}", 0, (lookahead,))


@cache
def verify_window(lookahead: int) -> Window:
    """The paper's second pass, which verifies `lookahead` drafts."""
    return Window(f"verify-{_checked_lookahead(lookahead)}", lookahead, ())


@cache
def copy_window(drafts: int) -> Window:
    """Verifies `drafts` copied drafts, and lays out `ar`."""
    return Window(f"copy-{drafts}", drafts, ())


def prefill_window(width: int) -> Window:
    """A prompt chunk: a chain of `width` rows."""
    return Window(f"prefill-{width}", width - 1, ())


def fused_window(groups: Sequence[int]) -> Window:
    """Return the window that verifies len(groups) - 1 drafts and makes groups[a] if `a` are
    accepted. Raises PassError for other groups."""
    drafts = _checked_lookahead(len(groups) - 1)
    if not all(0 <= size <= drafts for size in groups) or not groups[0]:
        raise PassError(
            f"fused:{','.join(map(str, groups))} has {drafts} draft rows, so the first group must "
            f"have 1 to {drafts} rows and the others 0 to {drafts}"
        )
    all_full = all(size == drafts for size in groups)
    name = f"fused-{drafts}" if all_full else f"fused:{','.join(map(str, groups))}"
    return Window(name, drafts, tuple(groups))


def bundle_windows(lookahead: int, copy_drafts: Sequence[int] = COPY_DRAFTS) -> Sequence[Window]:
    """The windows for which a bundle has tails."""
    windows = [ar_window()]
    for length in range(1, lookahead + 1):
        windows += (
            draft_window(length),
            verify_window(length),
            fused_window([length] * (length + 1)),
        )
    return [*windows, *(copy_window(drafts) for drafts in copy_drafts if drafts > lookahead)]


def _checked_lookahead(lookahead: int) -> int:
    if not 1 <= lookahead <= MAX_LOOKAHEAD:
        raise PassError(f"look-ahead must be 1 to {MAX_LOOKAHEAD}, not {lookahead}")
    return lookahead
