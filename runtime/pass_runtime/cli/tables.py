"""Prints tables: the report of `bench`, and the plans that `generate --explain` compares.

Words are never cut, even in a narrow terminal. Without a terminal tables are 80 columns wide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pass_runtime.tuning.estimates import shape_of
from pass_runtime.tuning.tuner import DRAFT_MARGIN, SWITCH_MARGIN, Tuner


class OutputConsole(Console):
    """Standard output. If its reader is gone, BrokenPipeError is raised for `one_line_errors`."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_table(console: Console, table: Table) -> None:
    """Print a table whose columns are at least as wide as their longest words. Remaining width goes
    to the first columns. If the table is wider than the console, the terminal wraps its lines."""
    texts = [
        [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
        for column in table.columns
    ]
    line_widths = [
        max(cell_len(line) for text in cells for line in text.splitlines() or [""])
        for cells in texts
    ]
    word_widths = [
        line_width
        if column.no_wrap
        else max(cell_len(word) for text in cells for word in text.split() or [""])
        for column, cells, line_width in zip(table.columns, texts, line_widths, strict=True)
    ]
    _, right, _, left = table.padding
    borders = len(texts) + 1 if table.box is not None else 0
    room = console.width - sum(word_widths) - len(texts) * (left + right) - borders
    for column, word_width, line_width in zip(table.columns, word_widths, line_widths, strict=True):
        extra = min(max(room, 0), line_width - word_width)
        column.width = word_width + extra
        room -= extra
    console_width = console.width
    console.width = console_width - min(room, 0)
    console.print(table)
    console.width = console_width


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


MAX_TABLE_PROMPTS, MAX_TABLE_PLANS = 12, 4
"""The table of single prompts is printed only for at most so many prompts and plans."""
BAR_COLUMNS = 48
"""The length of the longest bar, in columns of the terminal."""


def print_plans(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report of `bench` on a console, by default standard output."""
    plans, console = report["plans"], console or OutputConsole()
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
    for line in (*_bars(plans), *_notes(report)):
        console.print(line, soft_wrap=not console.is_terminal)
    for difference in report["differences"]:
        click.secho(f"DIFFERENT TEXT: {difference}", fg="red", bold=True, err=True)


def _bars(plans: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a bar for the ratio of each plan, if there are several."""
    columns = max(len(plan["plan"]) for plan in plans)
    max_ratio = max(plan["ratio"] for plan in plans)
    for plan in plans if len(plans) > 1 else ():
        bar = "\N{FULL BLOCK}" * round(BAR_COLUMNS * plan["ratio"] / max_ratio)
        yield Text.assemble(f"{plan['plan']:<{columns}} {plan['ratio']:5.2f} ", (bar, "cyan"))


def _notes(report: dict[str, Any]) -> Iterator[Text]:
    """Yield the lines below the tables and bars."""
    yield Text(f"look-ahead embeddings: {report['lookahead_source']}")
    for name, reason in report["uncaptured"].items():
        yield Text(f"{name} ran without a CUDA graph: {reason}", style="yellow")
    if report["device"] != "cpu" and not report["uncaptured"]:
        yield Text("passes were captured as CUDA graphs")
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
        yield Text(
            f"auto is {last['ratio']:.2f} times as fast as plain decoding (ar) here; {comparison}",
            style="bold",
        )
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
    if "cost" in plan:
        cells["host"] = f"{plan['host_milliseconds_per_pass']:.2f}"
        predicted = plan["predicted_tokens_per_second_each"]
        figures = {
            "trunk": plan["trunk_milliseconds"],
            "tail": plan["tail_milliseconds"],
            "cost": plan["cost"],
            "measured / predicted": predicted and plan["tokens_per_second_each"] / predicted,
        }
        cells |= {
            heading: "-" if figure is None else f"{figure:.2f}"
            for heading, figure in figures.items()
        }
    rates = plan["acceptance_of_tried"]
    cells["acceptance by position"] = (
        " ".join("-" if rate is None else f"{rate:.2f}" for rate in rates) or "-"
    )
    return cells


def _by_prompt(plans: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield a row for every prompt: the baseline's speed, then ratio and tau of the other plans."""
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
    candidates = tuner.candidates(tuner.max_drafts if depth is None else depth)
    times = tuner.times()
    plain = next(candidate for candidate in candidates if candidate.cycle.name == "ar")
    table = Table(title="plan auto: expected tokens per second", title_justify="left")
    for heading in ("plan", "rows", "ms/pass", "tokens/pass", "tokens/s", "against ar"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for candidate in candidates:
        plans = candidate.cycle.plans
        style = "[bold]" if candidate.cycle == tuner.decided.cycle else ""
        estimated = "" if all(shape_of(plan) in times.pass_counts for plan in plans) else "~"
        table.add_row(
            style + " + ".join(plan.name for plan in plans),
            "+".join(str(plan.width) for plan in plans),
            f"{estimated}{1e3 * candidate.seconds:.1f}",
            f"{candidate.tokens:.2f}",
            f"{candidate.rate:.1f}",
            f"{candidate.rate / plain.rate:.2f}",
        )
    show_table(console, table)
    lines = [
        "~ has not run yet: its time is estimated from passes that were timed at the start",
        (
            f"in use: {tuner.decided.cycle.plans[0].name}; another plan is used if it is "
            f"{SWITCH_MARGIN:.2f} times as fast, and {DRAFT_MARGIN:.2f} times as fast as ar"
        ),
        f"passes now take {times.slowness:.2f} times as long as at the start",
        "conditional acceptance of look-ahead draft i: " + _rates(tuner.lookahead_acceptance.rates),
    ]
    for match_length, acceptance in sorted(tuner.ngram_acceptance.items()):
        lines.append(
            f"conditional acceptance of n-gram draft i, {match_length} tokens matched: "
            f"{_rates(acceptance.rates)}"
        )
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
