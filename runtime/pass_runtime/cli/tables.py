"""What commands print as tables: the report of `bench`, and the menu of `generate --explain`.

Words are never cut, however narrow the terminal is. (Without a terminal the width is 80 columns.)
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
from pass_runtime.tuning.tuner import SWITCH_MARGIN, PlanTuner


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


def show_rows(
    title: str, rows: Iterable[Mapping[str, str]], left: Collection[str] = (), console: Console | None = None
) -> None:
    """Print rows that have the same headings. Columns are aligned to the right, but for those in `left`."""
    table = Table(title=title, title_justify="left")
    for number, row in enumerate(rows):
        for heading in row if number == 0 else ():
            table.add_column(heading, justify="left" if heading in left else "right")
        table.add_row(*row.values())
    show_table(console or OutputConsole(), table)


MOST_PROMPTS, MOST_PLANS = 12, 4
"""Of more prompts or plans than these there is no table by prompt."""


BAR_COLUMNS = 48
"""The length of the longest bar."""


def print_plans(report: dict[str, Any], console: Console | None = None) -> None:
    """Print the report, to standard output if there is no `console`."""
    plans, console = report["plans"], console or OutputConsole()
    batched = any(plan["batch"] for plan in plans)
    if not batched and report["prompts"] <= MOST_PROMPTS and len(plans) <= MOST_PLANS:
        title = f"tokens/s of {plans[0]['plan']}; ratio to it, and tokens per pass (tau), of the others"
        show_rows(title, _by_prompt(plans), ("prompt",), console)
    model = f"{report['bundle']} ({report['weights']}) on {report['device']}: {report['machine']}"
    rows = [_cells(plan, batched=batched) for plan in plans]
    show_rows(model, rows, ("plan", "acceptance by position"), console)
    for line in (*_bars(plans), *_lines(report)):
        console.print(line, soft_wrap=True)
    for difference in report["differences"]:
        click.secho(f"ANOTHER TEXT: {difference}", fg="red", bold=True, err=True)


def _bars(plans: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Yield a bar for the ratio of each plan, if there are several."""
    names = [plan["plan"] for plan in plans]
    longest = max(plan["ratio"] for plan in plans)
    for name, plan in zip(names, plans, strict=True) if len(plans) > 1 else ():
        bar = "\N{FULL BLOCK}" * round(BAR_COLUMNS * plan["ratio"] / longest)
        yield Text.assemble(f"{name:<{max(map(len, names))}} {plan['ratio']:5.2f} ", (bar, "cyan"))


def _lines(report: dict[str, Any]) -> Iterator[Text]:
    """Yield what follows the tables."""
    yield Text(f"look-ahead embeddings: {report['lookahead_source']}")
    for name, reason in report["uncaptured"].items():
        yield Text(f"{name} ran without a CUDA graph: {reason}", style="yellow")
    if report["device"] != "cpu" and not report["uncaptured"]:
        yield Text("passes were captured as CUDA graphs")
    if report["looping"]:
        yield Text(f"{report['looping']} of the {report['prompts']} texts run into a loop, which is easy to draft")
    if report["differences"]:
        return
    if report["rule"] == "rejection" and report["sampling"]["temperature"] > 0:
        same = "the rejection rule: every plan wrote a text of its own from the same distribution"
    elif report["near_ties"]:
        same = "every plan wrote the same text, up to near-ties: " + "; ".join(report["near_ties"])
    else:
        same = "every plan wrote the same text, token for token"
    first, last = report["plans"][0], report["plans"][-1]
    if (first["plan"], last["plan"]) == ("ar", "auto"):
        yield Text(f"auto is {last['ratio']:.2f} times as fast as plain decoding (ar) here; {same}", style="bold")
    else:
        yield Text(same)


def _cells(plan: dict[str, Any], *, batched: bool) -> dict[str, str]:
    """Return a row of the table of plans; acceptance is per draft position, 1..L."""
    cells = {"plan": plan["plan"], "tokens/s in all" if batched else "tokens/s": f"{plan['tokens_per_second']:.1f}"}
    if batched:
        cells["each"] = f"{plan['tokens_per_second_each']:.1f}"
    cells["ratio"] = f"{plan['ratio']:.2f}"
    cells["tau"] = f"{plan['tau']:.2f}"
    cells["ms/pass"] = f"{plan['milliseconds_per_pass']:.1f}"
    if "cost" in plan:
        cells["host"] = f"{plan['host_milliseconds_per_pass']:.2f}"
        names, predicted = ("trunk_milliseconds", "tail_milliseconds", "cost"), plan["predicted_tokens_per_second_each"]
        parts = [plan[name] for name in names] + [predicted and plan["tokens_per_second_each"] / predicted]
        headings = ("trunk", "tail", "cost", "measured / predicted")
        cells |= {name: "-" if part is None else f"{part:.2f}" for name, part in zip(headings, parts, strict=True)}
    cells["acceptance by position"] = " ".join(f"{rate:.2f}" for rate in plan["acceptance_per_position"]) or "-"
    return cells


def _by_prompt(plans: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yield a row for every prompt."""
    baseline, *others = plans
    for number, plain in enumerate(baseline["by_prompt"]):
        row = {"prompt": plain["prompt"], baseline["plan"]: f"{plain['tokens_per_second']:.1f}"}
        for plan in others:
            found = plan["by_prompt"][number]
            row[plan["plan"]] = f"{found['ratio']:.2f} ({found['tau']:.2f})"
        yield row


def print_reasoning(tuner: PlanTuner, lookahead: int | None) -> None:
    """Print on stderr the menu with its present estimates, best first, and what the estimates rest on."""
    console = Console(stderr=True, highlight=False)
    candidates, times = tuner.candidates(tuner.lookahead if lookahead is None else lookahead), tuner.times()
    plain = next(c for c in candidates if c.cycle.name == "ar")
    table = Table(title="plan auto: expected tokens per second", title_justify="left")
    for heading in ("plan", "rows", "ms/pass", "tokens/pass", "tokens/s", "against ar"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for candidate in candidates:
        plans = candidate.cycle.plans
        mark = "[bold]" if candidate.cycle == tuner.decided.cycle else ""
        table.add_row(
            mark + " + ".join(plan.name for plan in plans),
            "+".join(str(plan.width) for plan in plans),
            f"{'' if all(shape_of(plan) in times.passes for plan in plans) else '~'}{1e3 * candidate.seconds:.1f}",
            f"{candidate.tokens:.2f}",
            f"{candidate.rate:.1f}",
            f"{candidate.rate / plain.rate:.2f}",
        )
    show_table(console, table)
    lines = [
        "~ has not run yet: its time follows from those of passes that were timed at the start",
        f"in use now: {tuner.decided.cycle.plans[0].name}; another must promise {SWITCH_MARGIN:.2f} times that",
        f"passes take {times.slowness:.2f} times as long as they did then",
        "conditional acceptance of look-ahead draft i: " + _rates(tuner.lookahead_drafts.rates),
    ]
    for matched, acceptance in sorted(tuner.ngrams.items()):
        lines.append(f"conditional acceptance of n-gram draft i, {matched} tokens matched: {_rates(acceptance.rates)}")
    for line in lines:
        console.print(line, soft_wrap=True)


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
