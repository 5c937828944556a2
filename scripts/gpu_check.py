"""Whether this toolkit works on a machine with a GPU, within minutes: see scripts/gpu_check.sh.

    scripts/gpu_check.sh --minutes 10 -o build/gpu

Steps are processes of their own, in the order in which they tell most (`gpu_checks/steps.py`). One that cannot be run
is skipped with the reason. DIR has report.json and report.md, written after every step, and gpu_check.log. The last
line is the verdict: works (status 0), wrong (1), nothing ran (3), works but not captured (4).
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from gpu_checks.machine import look
from gpu_checks.report import VERDICTS, tables, verdict, write_report
from gpu_checks.running import Result, run_steps
from gpu_checks.steps import BUNDLE, ROOT, plan_steps
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows
from pass_runtime.errors import PassError


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=BUNDLE)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=ROOT / "build/gpu", help="For the results.")
@click.option(
    "--minutes", type=click.FloatRange(0, min_open=True), default=10, show_default=True, help="For all steps."
)
@click.option("--tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each benchmark's answers.")
@click.option("--only", multiple=True, help="Steps whose names begin with this; repeatable.  [default: all]")
@one_line_errors
def main(bundle: Path, output: Path, minutes: float, tokens: int, only: tuple[str, ...]) -> None:
    """Run everything that needs a GPU, on BUNDLE and on models of its own, and say whether it works."""
    bundle, output = bundle.absolute(), output.absolute()
    if bundle != BUNDLE and not (bundle / FILE_NAME).is_file():
        raise PassError(f"{bundle} is not a bundle; make one with pass-export")
    found = look()
    output.mkdir(parents=True, exist_ok=True)
    steps = [step for step in plan_steps(found, bundle, tokens) if not only or step.name.startswith(only)]
    progress = Console(stderr=True)

    def done(results: list[Result]) -> None:
        write_report(output, bundle, found, results)
        last = results[-1]
        progress.print(Text(f"{last.name:27} {last.status:8} {last.seconds:4.0f} s  {last.reason}"))

    results = run_steps(steps, 60 * minutes, output / "gpu_check.log", done)
    write_report(output, bundle, found, results)
    for title, rows in tables(found, results).items():
        shown = [{heading: escape(cell) for heading, cell in row.items()} for row in rows]
        show_rows(title, shown, left=("", "as found", "step", "status", "reason", "plan", "name", "check", "result"))
    name, why = verdict(found, results)
    click.echo(f"VERDICT: {name} ({why})")
    sys.exit(VERDICTS[name])


if __name__ == "__main__":
    main()
