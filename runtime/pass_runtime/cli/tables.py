"""Tables whose words are never cut, however narrow the terminal is. (Without a terminal the width is 80 columns.)"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text


class OutputConsole(Console):
    """Standard output. Where its reader has ended, commands end as after any other output (`one_line_errors`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_table(console: Console, table: Table) -> None:
    """Print a table whose columns are at least as wide as their longest words; what room is left widens the first
    columns. A table that is wider than the console is printed all the same: a terminal wraps its lines."""
    texts = [[Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)] for column in table.columns]
    wanted = [max(cell_len(line) for text in column for line in text.splitlines() or [""]) for column in texts]
    widths = [
        whole if column.no_wrap else max(cell_len(word) for text in cells for word in text.split() or [""])
        for column, cells, whole in zip(table.columns, texts, wanted, strict=True)
    ]
    _, right, _, left = table.padding
    borders = len(widths) + 1 if table.box is not None else 0
    room = console.width - sum(widths) - len(widths) * (left + right) - borders
    for number, column in enumerate(table.columns):
        more = min(max(room, 0), wanted[number] - widths[number])
        column.width = widths[number] + more
        room -= more
    usual = console.width
    console.width = usual - min(room, 0)
    console.print(table)
    console.width = usual


def show_rows(title: str, rows: Iterable[Mapping[str, str]], left: Collection[str] = ()) -> None:
    """Print rows that have the same headings. Columns are aligned to the right, but for those in `left`."""
    table = Table(title=title, title_justify="left")
    for number, row in enumerate(rows):
        for heading in row if number == 0 else ():
            table.add_column(heading, justify="left" if heading in left else "right")
        table.add_row(*row.values())
    show_table(OutputConsole(), table)
