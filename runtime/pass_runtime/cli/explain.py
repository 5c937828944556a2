"""pass-run generate --explain: what `--plan auto` measured, observed and concluded, as a table."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from pass_runtime.cli.tables import show_table
from pass_runtime.tuning.tuner import ADVANTAGE, PlanTuner


def print_reasoning(tuner: PlanTuner, lookahead: int | None) -> None:
    """Print on stderr the candidate plans with their present estimates, best first, and what the estimates rest on."""
    console = Console(stderr=True, highlight=False)
    candidates = tuner.candidates(tuner.lookahead if lookahead is None else lookahead)
    plain = next(c for c in candidates if c.cycle.name == "ar")
    table = Table(title="plan auto: expected tokens per second", title_justify="left")
    for heading in ("plan", "rows", "ms/pass", "tokens/pass", "tokens/s", "against ar", "doubt"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for candidate in candidates:
        mark = "[bold]" if candidate.cycle == tuner.chosen else ""
        table.add_row(
            mark + " + ".join(plan.name for plan in candidate.cycle.plans),
            "+".join(str(plan.width) for plan in candidate.cycle.plans),
            f"{1e3 * candidate.seconds:.1f}",
            f"{candidate.tokens:.2f}",
            f"{candidate.rate:.1f}",
            f"{candidate.rate / plain.rate:.2f}",
            f"{candidate.doubt:.2f}",
        )
    show_table(console, table)
    present, times = tuner.chosen.plans[0].name, tuner.times()
    console.print(
        f"in use now: {present}; a plan must promise {ADVANTAGE:.2f} times that, less what is in doubt, to be taken up",
        soft_wrap=True,
    )
    console.print("a pass takes, in ms: " + _milliseconds(times.terms), soft_wrap=True)
    console.print(f"passes deviate from that by {100 * times.noise:.0f} %", soft_wrap=True)
    console.print(
        "conditional acceptance of look-ahead draft i: " + _rates(tuner.lookahead_drafts.rates), soft_wrap=True
    )
    for matched, acceptance in sorted(tuner.ngrams.items()):
        console.print(
            f"conditional acceptance of n-gram draft i, {matched} tokens matched: " + _rates(acceptance.rates),
            soft_wrap=True,
        )


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name}: {1e3 * value:.2f}" for name, value in seconds.items())


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
