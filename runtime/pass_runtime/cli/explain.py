"""pass-run generate --explain: the menu of `--plan auto`, as it stands after the text, as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pass_runtime.cli.tables import show_table
from pass_runtime.tuning.pass_times import shape_of
from pass_runtime.tuning.tuner import ADVANTAGE, PlanTuner


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
        f"in use now: {tuner.decided.cycle.plans[0].name}; another must promise {ADVANTAGE:.2f} times that",
        f"passes take {times.slowness:.2f} times as long as they did then",
        "conditional acceptance of look-ahead draft i: " + _rates(tuner.lookahead_drafts.rates),
    ]
    for matched, acceptance in sorted(tuner.ngrams.items()):
        lines.append(f"conditional acceptance of n-gram draft i, {matched} tokens matched: {_rates(acceptance.rates)}")
    for line in lines:
        console.print(line, soft_wrap=True)


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
