"""Draws docs/windows.svg: the windows of the plans `ar`, two-pass and fused.

    python scripts/draw_windows.py

Rows, masks and the order of plans are those of `pass_runtime.bundle.plan`. The same version of
matplotlib always writes the same bytes, so tests/docs can compare the file with what is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from pass_runtime.bundle.plan import Plan, RowKind, make_cycle

PICTURE = Path(__file__).parent.parent / "docs" / "windows.svg"
LOOKAHEAD = 2
WIDTH, HEIGHT, CELL_INCHES = 27.0, 21.9, 0.325
"""Width and height of the picture in cells, and the size of a cell in inches."""
POSITION_PITCH, LINE_PITCH, WINDOW_PITCH, MASK_CELL = 1.12, 1.4, 2.5, 0.75
"""Distances in cells between positions, lines and windows; the size of a mask's entry."""
PAPER_COLOUR, PANEL_COLOUR, HIDDEN_COLOUR = "#ffffff", "#f3f5f8", "#e3e7ec"
TEXT_COLOUR, NOTE_COLOUR = "#1f2328", "#59636e"
COLOURS = {RowKind.ROOT: "#0b62a8", RowKind.DRAFT: "#eeaa3c", RowKind.LOOKAHEAD: "#0f7b5a"}
LABEL_COLOURS = dict.fromkeys(RowKind, PAPER_COLOUR) | {RowKind.DRAFT: TEXT_COLOUR}
LEGEND = {
    RowKind.ROOT: "root: the newest token",
    RowKind.DRAFT: "draft: a guess, to be checked",
    RowKind.LOOKAHEAD: "look-ahead: a learned embedding that guesses",
}
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
STYLE: Any = {"svg.hashsalt": "windows", "svg.fonttype": "path", "font.family": "DejaVu Sans"}
ARROW: Any = {"arrowstyle": "-|>", "mutation_scale": 7, "linewidth": 1, "linestyle": (0, (2, 1.5))}

Point = tuple[float, float]


class Canvas:
    """Draws text, cells and arrows. Coordinates are in cells, x to the right and y downwards."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes

    def text(
        self, at: Point, text: str, size: float = 8.5, colour: str = TEXT_COLOUR, **style: Any
    ) -> None:
        style = {"ha": "left", "va": "center", **style}
        self._axes.text(*at, text, fontsize=size, color=colour, **style)

    def panel(self, at: Point, width: float, height: float, title: str, note: str) -> None:
        x, y = at
        style = "round,pad=0,rounding_size=0.35"
        shape = FancyBboxPatch(at, width, height, boxstyle=style, linewidth=0, zorder=0)
        shape.set_facecolor(PANEL_COLOUR)
        self._axes.add_patch(shape)
        self.text((x + 0.5, y + 0.95), title, 10.5, weight="bold", va="baseline")
        end_of_title = x + 1.2 + 0.33 * len(title)
        self.text((end_of_title, y + 0.95), note, 8, NOTE_COLOUR, va="baseline")

    def cell(self, at: Point, kind: RowKind, label: str, *, outlined: bool = False) -> None:
        """Draw one row of a window. outlined: draw the outline only, as for the next window."""
        (x, y), colour = at, COLOURS[kind]
        style = {"boxstyle": "round,pad=0,rounding_size=0.16", "linewidth": 1.4, "zorder": 2}
        shape = FancyBboxPatch((x + 0.05, y + 0.05), 0.9, 0.9, **style)
        shape.set(edgecolor=colour, facecolor=PAPER_COLOUR if outlined else colour)
        self._axes.add_patch(shape)
        lettering = TEXT_COLOUR if outlined else LABEL_COLOURS[kind]
        self.text((x + 0.5, y + 0.5), label, 7.2, lettering, ha="center", zorder=3)

    def square(self, at: Point, size: float, colour: str) -> None:
        style = {"facecolor": colour, "edgecolor": PANEL_COLOUR, "linewidth": 1.2}
        self._axes.add_patch(Rectangle(at, size, size, **style))

    def line(self, points: Sequence[Point]) -> None:
        self._axes.plot(*zip(*points, strict=True), color=NOTE_COLOUR, linewidth=1.1, zorder=1)

    def arrow(self, start: Point, end: Point) -> None:
        """Draw a dashed arrow."""
        style = {"color": TEXT_COLOUR, "shrinkA": 0, "shrinkB": 0, "zorder": 4, **ARROW}
        self._axes.add_patch(FancyArrowPatch(start, end, **style))


def labels(plan: Plan) -> list[str]:
    """Return each row's label: root; d₁, d₂, ... (drafts); LA₁, LA₂, ... (look-ahead rows)."""
    drafts = [f"d{i + 1}" for i in range(plan.drafts)]
    lookahead = [f"LA{i + 1}" for i in plan.lookahead_ids(0)]
    return ["root", *(name.translate(SUBSCRIPTS) for name in (*drafts, *lookahead))]


def line_numbers(plan: Plan) -> list[int]:
    """Return each row's line in the picture, 0 at the top.

    A fused window has a line for each group, and the root and the drafts are below them. Other
    windows have one line.
    """
    numbers: list[int] = []
    groups = iter(range(len(plan.groups)))
    for row in plan.rows:
        if row.kind is not RowKind.LOOKAHEAD:
            numbers.append(len(plan.groups) if plan.is_fused else 0)
        elif plan.is_fused and plan.rows[row.parent].kind is not RowKind.LOOKAHEAD:
            numbers.append(next(groups))  # the first row of a group
        else:
            numbers.append(numbers[row.parent])
    return numbers


def pass_note(plan: Plan) -> str:
    """Return what a pass of `plan` emits and leaves, in the words of the docs' table of plans."""
    emitted = "emits 1 + accepted" if plan.drafts else "emits 1"
    if not plan.groups:
        return emitted
    return f"{emitted},\nleaves {plan.next_draft_depth(plan.drafts)} drafts"


def draw_window(canvas: Canvas, plan: Plan, origin: Point, *, is_next: bool = False) -> list[Point]:
    """Draw the rows at their positions, each with a line to its parent. Return their coordinates.

    is_next: draw the window as the last of `draw_passes`: in outline, and a fused one without its
    groups, so that the root and the drafts are on the first line.
    """
    without_groups = is_next and plan.is_fused
    first_line = len(plan.groups) if without_groups else 0
    places = [
        (origin[0] + POSITION_PITCH * int(position), origin[1] + LINE_PITCH * (line - first_line))
        for position, line in zip(plan.row_position, line_numbers(plan), strict=True)
    ]
    for row, (x, y), label in zip(plan.rows, places, labels(plan), strict=True):
        if without_groups and row.kind is RowKind.LOOKAHEAD:
            continue
        if row.parent >= 0:
            parent_x, parent_y = places[row.parent][0] + 0.5, places[row.parent][1] + 0.5
            canvas.line([(parent_x, parent_y), (parent_x, y + 0.5), (x + 0.5, y + 0.5)])
        canvas.cell((x, y), row.kind, label, outlined=is_next)
    return places


def draw_passes(canvas: Canvas, plans: Sequence[Plan], origin: Point, label_x: float) -> None:
    """Draw the windows of successive passes below one another, with all drafts accepted.

    Arrows lead from each row to the row of the next window that its output becomes. The last window
    is only outlined, as the one that comes next.
    """
    x, y = origin
    sources: list[Point] = []
    for number, plan in enumerate(plans, 1):
        is_next = number == len(plans)
        places = draw_window(canvas, plan, (x, y), is_next=is_next)
        for (x0, y0), (x1, y1) in zip(sources, places, strict=False):
            canvas.arrow((x0 + 0.72, y0 + 0.97), (x1 + 0.28, y1 + 0.03))
        root_y = places[0][1]
        name = f"{plan.name}, ..." if is_next else plan.name
        canvas.text((label_x, root_y + 0.28), name, weight="bold")
        if not is_next:
            style: dict[str, Any] = {"va": "top", "linespacing": 1.15}
            canvas.text((label_x, root_y + 0.75), pass_note(plan), 7.5, NOTE_COLOUR, **style)
        # The last accepted row gives the next root, and the rows after it the next drafts.
        sources = [places[row] for row in (plan.drafts, *plan.draft_rows[plan.drafts])]
        x, y = x + POSITION_PITCH * (plan.drafts + 1), root_y + WINDOW_PITCH
    positions = plans[-1].drafts + 1 if plans[-1].is_fused else plans[-1].width
    positions += sum(plan.drafts + 1 for plan in plans[:-1])
    for position in range(positions):
        at = (origin[0] + POSITION_PITCH * position + 0.5, origin[1] - 0.4)
        canvas.text(at, str(position), 6.5, NOTE_COLOUR, ha="center")
    canvas.text((origin[0] - 0.25, origin[1] - 0.4), "position", 6.5, NOTE_COLOUR, ha="right")


def draw_mask(canvas: Canvas, plan: Plan, at: Point) -> None:
    """Draw the mask of a window. Entries that a row sees have the colour of their column's row."""
    x, y = at
    canvas.text((x - 1.3, y - 1.0), f"what rows of {plan.name} see", 7.5, NOTE_COLOUR)
    for i, (label, seen) in enumerate(zip(labels(plan), plan.window_mask, strict=True)):
        canvas.text((x - 0.15, y + (i + 0.5) * MASK_CELL), label, 6.2, NOTE_COLOUR, ha="right")
        canvas.text((x + (i + 0.5) * MASK_CELL, y - 0.32), label, 6.2, NOTE_COLOUR, ha="center")
        for j, visible in enumerate(seen):
            colour = COLOURS[plan.rows[j].kind] if visible else HIDDEN_COLOUR
            canvas.square((x + j * MASK_CELL, y + i * MASK_CELL), MASK_CELL, colour)


def draw_groups(canvas: Canvas, plan: Plan, origin: Point) -> None:
    """Label each group of a fused plan with the accepted drafts after which it drafts."""
    for accepted, size in enumerate(plan.groups):
        x = origin[0] + POSITION_PITCH * (accepted + size + 1) + 0.2
        y = origin[1] + LINE_PITCH * accepted + 0.5
        canvas.text((x, y), f"{accepted} accepted: the next drafts", 7.5, NOTE_COLOUR)


def draw_legend(canvas: Canvas, at: Point) -> None:
    """Draw the legend of colours and arrows."""
    x, y = at
    for kind, words in LEGEND.items():
        canvas.cell((x, y), kind, "")
        canvas.text((x + 1.2, y + 0.5), words, 8)
        x += 2.0 + 0.19 * len(words)
    x, y = at[0], y + 1.6
    canvas.arrow((x + 0.1, y), (x + 0.9, y))
    words = "a row's output is in the next window; here every draft is right."
    canvas.text((x + 1.2, y), words, 8)
    words = "Besides its window, a row sees all of the text before it."
    canvas.text((x + 14.6, y), words, 8)


def draw() -> Figure:
    """Return the whole picture."""
    (ar,), (draft, verify), (fused,) = (
        make_cycle(mode, LOOKAHEAD).plans for mode in ("ar", "two-pass", "fused")
    )
    figure = Figure((WIDTH * CELL_INCHES, HEIGHT * CELL_INCHES), facecolor=PAPER_COLOUR)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    axes.axis("off")
    canvas = Canvas(axes)
    canvas.panel((0.3, 0.3), 7.0, 8.6, "ar", "plain decoding")
    draw_passes(canvas, [ar, ar, ar], (3.6, 2.6), 0.8)
    canvas.panel((7.6, 0.3), 19.1, 8.6, "two-pass", "a draft pass, then a verify pass")
    draw_passes(canvas, [draft, verify, draft], (12.8, 2.6), 8.1)
    draw_mask(canvas, draft, (23.2, 2.6))
    draw_mask(canvas, verify, (23.2, 6.3))
    note = "both in one pass: whatever is accepted, the next drafts are there"
    canvas.panel((0.3, 9.2), 26.4, 10.2, "fused", note)
    draw_passes(canvas, [fused, fused], (6.1, 11.5), 0.8)
    draw_groups(canvas, fused, (6.1, 11.5))
    draw_mask(canvas, fused, (19.5, 11.5))
    draw_legend(canvas, (0.8, 19.7))
    return figure


def render() -> str:
    """Return the picture as SVG, without dates and random ids."""
    with matplotlib.rc_context(STYLE):
        text = io.StringIO()
        draw().savefig(text, format="svg", metadata={"Date": None})
    return re.sub(r"[ \t]+$", "", text.getvalue(), flags=re.MULTILINE)


def drawn_by(svg: str) -> str:
    """Return the version of matplotlib that wrote `svg`."""
    title = re.search(r"<dc:title>Matplotlib v([^,<]+)", svg)
    return title[1] if title else "unknown"


if __name__ == "__main__":
    PICTURE.write_text(render(), encoding="utf-8")
