"""pass-export: command line over `pass_exporter.export.export`."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from pass_exporter.config import DTYPES, WEIGHTS, ExportConfig
from pass_runtime.cli.errors import interrupt_on_signals, one_line_errors
from pass_runtime.plan import MAX_LOOKAHEAD
from pass_runtime.sampling import RULES


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", required=True, help="Registry name, hub id (owner/name), local directory, or .gguf file.")
@click.option("--lookahead", type=int, default=4, show_default=True, help=f"L, drafts per round: 1..{MAX_LOOKAHEAD}.")
@click.option(
    "--lookahead-weights",
    type=click.Path(path_type=Path),
    help="What pass-train wrote, or `mean`: untrained.  [default: the model's shipped weights, else mean]",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Bundle directory.  [default: <model>-pass<L>]")
@click.option("--dtype", type=click.Choice(DTYPES), default="fp32", show_default=True, help="Weights and KV cache.")
@click.option("--weights", type=click.Choice(WEIGHTS), default="full", show_default=True, help="Of the linear layers.")
@click.option("--rule", type=click.Choice(RULES), default="match", show_default=True, help="When a draft is accepted.")
@click.option(
    "--verify", type=click.Path(path_type=Path), help="Text file: report perplexity and agreement with full precision."
)
@click.option("--force", is_flag=True, help="Replace a bundle that is already there.")
@one_line_errors
def main(**options: Any) -> None:
    """Export a frozen decoder with look-ahead embeddings into a bundle for pass-run."""
    config = ExportConfig(**options)
    interrupt_on_signals()
    console = Console(stderr=True)
    weights = "" if config.weights == "full" else f", {config.weights} weights"
    console.print(f"[bold]pass-export[/] {config.model}, look-ahead {config.lookahead}, {config.dtype}{weights}")
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: our progress lines are the only ones
    # torch takes seconds to import: --help and bad options should not wait for it.
    with _Terminal(console) as progress:
        progress.phase("importing torch")
        from pass_exporter.export import export

        report = export(config, progress)
    lookahead = report.manifest.lookahead
    console.print(f"look-ahead embeddings   {lookahead.source}")
    if not lookahead.trained:
        console.print(
            "[yellow]  drafts will rarely be accepted until they are trained; the text is exact either way[/]"
        )
    limit = f"(limit {report.relative_error_limit:.0e})"
    console.print(f"trunk against torch     max relative error {report.relative_error:.1e} {limit}")
    note = f", then {report.near_tie}" if report.near_tie else ""
    console.print(f"every plan against ar   {report.greedy_tokens} greedy tokens equal{note}")
    if report.quality is not None:
        quality = report.quality
        console.print(
            f"perplexity              {quality.perplexity:.2f}, of the full-precision model "
            f"{quality.full_perplexity:.2f} ({quality.tokens} tokens)"
        )
        console.print(f"greedy agreement        {100 * quality.agreement:.1f} % of tokens")
    console.print(f"peak memory             {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f} GB")
    click.echo(report.output)


class _Terminal:
    """A line per phase: a spinner or a bar while it runs, its time when it is done."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
        )
        self._progress = Progress(*columns, TimeElapsedColumn(), console=console)
        self._task: TaskID | None = None

    def __enter__(self) -> _Terminal:
        self._progress.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._finish()
        self._progress.stop()

    def phase(self, name: str) -> Callable[[int, int], None]:
        self._finish()
        task = self._task = self._progress.add_task(name, total=None)
        return lambda done, total: self._progress.update(task, completed=done, total=total)

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, total=1, completed=1)
            self._progress.stop_task(self._task)


if __name__ == "__main__":
    sys.exit(main())
