"""What `pass-run bench` prints of its report: a table of the plans, one of the prompts, and the result in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.text import Text

from pass_runtime.cli.tables import OutputConsole, show_rows

MOST_PROMPTS, MOST_PLANS = 12, 4
"""Of more prompts or plans than these there is no table by prompt."""


def print_plans(report: dict[str, Any]) -> None:
    """Print the report."""
    plans = report["plans"]
    batched = any(plan["batch"] for plan in plans)
    if not batched and report["prompts"] <= MOST_PROMPTS and len(plans) <= MOST_PLANS:
        title = f"tokens/s of {plans[0]['plan']}; ratio to it, and tokens per pass (tau), of the others"
        show_rows(title, _by_prompt(plans), left=("prompt",))
    model = f"{report['bundle']} ({report['weights']}) on {report['device']}: {report['machine']}"
    rows = [_cells(plan, batched=batched) for plan in plans]
    show_rows(model, rows, left=("plan", "acceptance by position"))
    for line in _lines(report):
        OutputConsole().print(line, soft_wrap=True)
    for difference in report["differences"]:
        click.secho(f"ANOTHER TEXT: {difference}", fg="red", bold=True, err=True)


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
