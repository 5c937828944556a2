"""Prints tables: the report of `bench`, and the plans that `generate --explain` compares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pass_runtime.tuning.auto import DRAFT_MARGIN, SWITCH_MARGIN, Tuner, shape_of

SHOWN_POSITIONS = 6
MAX_TABLE_PROMPTS, MAX_TABLE_PLANS = 12, 4
"""The table of single prompts is printed only for at most so many prompts and plans."""


class OutputConsole(Console):
    """Standard output. If its reader is gone, BrokenPipeError is raised for `one_line_errors`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_table(console: Console, table: Table) -> None:
    """Print a table in which no word is cut. Remaining width goes to the first columns. A table
    that is wider than the console is wrapped by the terminal."""
    lengths = []
    for column in table.columns:
        cells = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
        words = cells if column.no_wrap else [word for cell in cells for word in cell.split()]
        lengths.append((max(map(cell_len, words), default=0), max(map(cell_len, cells))))
    _, right, _, left = table.padding
    borders = len(lengths) + 1 if table.box is not None else 0
    width = console.width
    room = width - borders - sum(left + longest_word + right for longest_word, _ in lengths)
    console.width = width - min(room, 0)
    for column, (longest_word, longest_cell) in zip(table.columns, lengths, strict=True):
        extra = min(max(room, 0), longest_cell - longest_word)
        column.width = longest_word + extra
        room -= extra
    console.print(table)
    console.width = width


def show_rows(
    title: str,
    rows: Iterable[Mapping[str, str]],
    left: Collection[str] = (),
    console: Console | None = None,
) -> None:
    """Print rows, each a map from the same headings to cells. left: the headings of the columns
    that are aligned to the left; all others are aligned to the right."""
    table = Table(title=title, title_justify="left")
    for number, row in enumerate(rows):
        for heading in row if number == 0 else ():
            table.add_column(heading, justify="left" if heading in left else "right")
        table.add_row(*row.values())
    show_table(console or OutputConsole(), table)


def print_plans(report: dict[str, Any]) -> None:
    """Print the report of `bench`."""
    plans, console = report["plans"], OutputConsole()
    batched = any(plan["batch"] for plan in plans)
    if not batched and report["prompts"] <= MAX_TABLE_PROMPTS and len(plans) <= MAX_TABLE_PLANS:
        title = (
            f"tokens/s of {plans[0]['plan']}; ratio to it, and tokens per pass (tau), of the others"
        )
        show_rows(title, _by_prompt(plans), ("prompt",), console)
    device = f"{report['device']}, kernels {report['kernels']}"
    model = f"{report['bundle']} ({report['weights']}) on {device}: {report['machine']}"
    rows = [_cells(plan, batched=batched) for plan in plans]
    show_rows(model, rows, ("plan", "acceptance by position"), console)
    for line in _notes(report):
        console.print(line, soft_wrap=not console.is_terminal)
    for difference in report["differences"]:
        click.secho(f"DIFFERENT TEXT: {difference}", fg="red", bold=True, err=True)


def _notes(report: dict[str, Any]) -> Iterator[Text]:
    """Yield the lines below the tables."""
    yield Text(f"look-ahead embeddings: {report['lookahead_source']}")
    for name, reason in report["uncaptured"].items():
        yield Text(f"{name} ran without a CUDA graph: {reason}", style="yellow")
    if report["looping"]:
        yield Text(
            f"{report['looping']} of the {report['prompts']} texts repeat themselves, which is "
            "easy to draft"
        )
    first, last = report["plans"][0], report["plans"][-1]
    for plan in report["plans"][1:]:
        if plan["batch"] is None and plan["ratio"] < 1:
            cost = plan["milliseconds_per_pass"] / first["milliseconds_per_pass"]
            gain = plan["tau"] / first["tau"]
            yield Text(
                f"drafts did not pay with {plan['plan']}: a pass took {cost:.2f} times as long as "
                f"with {first['plan']}, for {gain:.2f} times as many tokens"
            )
    if report["differences"]:
        return
    if report["rule"] == "rejection" and report["sampling"]["temperature"] > 0:
        comparison = "by the rejection rule, plans draw different texts from the same distribution"
    elif report["near_ties"]:
        comparison = "every plan wrote the same text, up to near-ties: "
        comparison += "; ".join(report["near_ties"])
    else:
        comparison = "every plan wrote the same text, token for token"
    if (first["plan"], last["plan"]) == ("ar", "auto"):
        gain = f"auto is {last['ratio']:.2f} times as fast as plain decoding (ar) here"
        yield Text(f"{gain}; {comparison}", style="bold")
    else:
        yield Text(comparison)


def _cells(plan: dict[str, Any], *, batched: bool) -> dict[str, str]:
    """Return a row of the table of plans. batched: whether sequences ran together. The acceptance
    at position i is the share of passes that accepted it, of those that verified a draft there."""
    cells = {
        "plan": plan["plan"],
        "tokens/s in all" if batched else "tokens/s": f"{plan['tokens_per_second']:.1f}",
    }
    if batched:
        cells["each"] = f"{plan['tokens_per_second_each']:.1f}"
    cells["ratio"] = f"{plan['ratio']:.2f}"
    cells["tau"] = f"{plan['tau']:.2f}"
    cells["ms/pass"] = f"{plan['milliseconds_per_pass']:.1f}"
    shown = [each for each in plan["acceptance_of_tried"] if each is not None]
    more = " ..." if len(shown) > SHOWN_POSITIONS else ""
    cells["acceptance by position"] = figures(shown[:SHOWN_POSITIONS]) + more or "-"
    return cells


def figures(numbers: Iterable[float]) -> str:
    return " ".join(f"{number:.2f}" for number in numbers)


def _by_prompt(plans: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    baseline, *others = plans
    for number, entry in enumerate(baseline["by_prompt"]):
        row = {"prompt": entry["prompt"], baseline["plan"]: f"{entry['tokens_per_second']:.1f}"}
        for plan in others:
            other = plan["by_prompt"][number]
            row[plan["plan"]] = f"{other['ratio']:.2f} ({other['tau']:.2f})"
        yield row


def print_reasoning(tuner: Tuner, depth: int | None) -> None:
    """Print on stderr the plans that `auto` compares, best first, and what it has measured. depth:
    the most drafts of a request (`lookahead`); None: as many as there are."""
    console = Console(stderr=True, highlight=False)
    choices, times = tuner.choices(tuner.max_drafts if depth is None else depth), tuner.times()
    plain = next(choice for choice in choices if choice.plan.name == "ar")
    rows = []
    for choice in choices:
        windows = choice.plan.windows
        timed = all(shape_of(window) in times.pass_counts for window in windows)
        names = " + ".join(window.name for window in windows)
        rows.append(
            {
                "plan": f"[bold]{names}" if choice.plan == tuner.decided.plan else names,
                "rows": "+".join(str(window.width) for window in windows),
                "ms/pass": f"{'' if timed else '~'}{1e3 * choice.seconds:.1f}",
                "tokens/pass": f"{choice.tokens:.2f}",
                "tokens/s": f"{choice.rate:.1f}",
                "against ar": f"{choice.rate / plain.rate:.2f}",
            }
        )
    show_rows("plan auto: expected tokens per second", rows, ("plan",), console)
    acceptance = {"look-ahead draft i": tuner.rates.lookahead} | {
        f"n-gram draft i, confidence {confidence}": each
        for confidence, each in sorted(tuner.rates.by_confidence.items())
    }
    for line in (
        "~ has not run yet: its time is estimated from passes that were timed at the start",
        (
            f"in use: {tuner.decided.plan.windows[0].name}; another plan is used if it is "
            f"{SWITCH_MARGIN:.2f} times as fast, and {DRAFT_MARGIN:.2f} times as fast as ar"
        ),
        f"passes now take {times.slowness:.2f} times as long as at the start",
        *(
            f"conditional acceptance of {kind}: {figures(each.rates)}"
            for kind, each in acceptance.items()
        ),
    ):
        console.print(line, soft_wrap=not console.is_terminal)
