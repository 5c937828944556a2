"""pass-train: command line over `pass_trainer.run`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pass_exporter.terminal import Terminal, silence_libraries
from pass_runtime.bundle.plan import MAX_LOOKAHEAD
from pass_runtime.cli.errors import OneLineGroup, interrupt_on_signals, one_line_errors
from pass_runtime.errors import PassError

PATH = click.Path(path_type=Path)


class Temperatures(click.ParamType[Any]):
    """Numbers of 0 or more with commas between them."""

    name = "T,T,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        try:
            numbers = tuple(float(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of numbers such as 0,0.8,1", param, ctx)
        if not all(0 <= number < 100 for number in numbers):
            self.fail(f"temperatures are 0 or more, not {value}", param, ctx)
        return numbers


TEMPERATURES = Temperatures()
DATA = click.option(
    "--data",
    multiple=True,
    type=PATH,
    help="Where prompts come from: a text file, directory, or JSON lines, or `self`: the model writes them (default). "
    "Several are drawn from equally.",
)
MODEL = click.option("--model", help="Registry name, hub id (owner/name), local directory, or .gguf file.")
LOOKAHEAD = click.option(
    "--lookahead", type=int, default=4, show_default=True, help=f"L, drafts per round: 1..{MAX_LOOKAHEAD}."
)
DEVICE = click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
WIDTH = 110
"""Characters in a line of figures, where stderr is no terminal."""
DTYPE = click.option(
    "--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True, help="Of the frozen model."
)


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@MODEL
@DATA
@click.option("-o", "--output", type=PATH, help="Directory for weights, metrics, curves and model card.")
@LOOKAHEAD
@click.option("--adapter", type=click.Choice(["none", "lora"]), default="none", show_default=True)
@click.option("--rank", type=int, default=32, show_default=True, help="Of the adapter.")
@click.option("--adapter-from", type=int, default=0, show_default=True, help="The first layer that is adapted.")
@click.option("--head", is_flag=True, help="Train a draft head too: it knows the token before each draft.")
@click.option("--head-rank", type=int, default=96, show_default=True, help="Numbers by token in the head's table.")
@click.option("--head-width", type=int, default=384, show_default=True, help="Numbers of the head's state.")
@click.option("--start", type=PATH, help="Weights to go on from; an adapter of higher rank is cut down.")
@click.option("--steps", type=int, default=2000, show_default=True)
@click.option("--batch", type=int, default=1, show_default=True, help="Sequences per step and process.")
@click.option("--anchors", type=int, default=48, show_default=True, help="Places to draft from per sequence.")
@click.option("--lr", type=float, default=2e-3, show_default=True, help="Of the adapter; embeddings take ten times it.")
@click.option("--decay", type=float, default=0.8, show_default=True, help="Weight of a draft against the one before.")
@click.option(
    "--sequences",
    type=int,
    default=1024,
    show_default=True,
    help="That the model writes: one in 16, at most 32, to measure on, the others to train on.",
)
@click.option("--sequence-length", type=int, default=256, show_default=True, help="Tokens, the prompt included.")
@click.option("--prompt-tokens", type=(int, int), default=(16, 64), show_default=True, help="Fewest and most.")
@click.option("--chat-share", type=float, default=0.25, show_default=True, help="Of prompts, put as a chat message.")
@click.option(
    "--temperatures",
    type=TEMPERATURES,
    default="0,0.8,1",
    show_default=True,
    help="Of completions, 64 at a time in turn; 0 is greedy.",
)
@click.option(
    "--write-with",
    type=click.Choice(["auto", "torch", "w8a8"]),
    default="auto",
    show_default=True,
    help="Who writes the training text: the model in torch, or its w8a8 bundle, which is faster on a CPU (auto).",
)
@click.option("--seed", type=int, default=0, show_default=True)
@DTYPE
@DEVICE
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --output, if there is one.")
@click.option("--checkpoint-minutes", type=float, default=5.0, show_default=True)
@click.pass_context
@one_line_errors
def main(context: click.Context, /, **options: Any) -> None:
    """Train look-ahead embeddings, and an adapter for look-ahead rows, of a frozen model.

    Several GPUs: torchrun --nproc-per-node N -m pass_trainer.cli ...
    """
    if context.invoked_subcommand is not None:
        return
    for name in ("model", "output"):
        if not options[name]:
            raise PassError(f"missing --{name}; pass-train --help lists the options")
    interrupt_on_signals()
    _quiet_libraries()
    # torch takes seconds to import: --help and bad options should not wait for it.
    from pass_trainer.config import TrainConfig
    from pass_trainer.corpus import SELF
    from pass_trainer.distill import Recipe
    from pass_trainer.run import is_main, run

    recipe = Recipe(
        sequences=options.pop("sequences"),
        length=options.pop("sequence_length"),
        prompt=options.pop("prompt_tokens"),
        temperatures=options.pop("temperatures"),
        chat=options.pop("chat_share"),
        seed=options["seed"],
    )
    data = options.pop("data") or (Path(SELF),)
    config = TrainConfig(**options, data=data, recipe=recipe)
    try:
        with Terminal(Console(stderr=True), show=is_main()) as progress:
            report = run(config, progress)
    except KeyboardInterrupt:
        click.echo(f"the same command with --resume goes on from the last checkpoint in {config.output}", err=True)
        raise
    if is_main():
        _print_table([("held-out sequences, greedy", report.acceptance)], config.lookahead)
        click.echo(report.weights)


@main.command()
@click.argument("weights", type=PATH, required=False)
@MODEL
@click.option("--prompts", type=PATH, help='JSON lines with "id", "kind" (chat, text or code) and "prompt".')
@click.option("--tokens", type=int, default=128, show_default=True, help="That the model writes after each prompt.")
@click.option("--temperatures", default="0,0.8,1.0", show_default=True, help="Each is measured; 0 is greedy.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Of the sampled measurements; 0 is off.")
@LOOKAHEAD
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="fp32", show_default=True, help="Of the model.")
@DEVICE
@click.option("--record", is_flag=True, help="State the figures in WEIGHTS, and in the model card beside it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@one_line_errors
def evaluate(as_json: bool, record: bool, prompts: Path | None, temperatures: str, **options: Any) -> None:
    """How drafts survive, and tokens per pass, where the model answers prompts: chat, text and code.

    WEIGHTS is a file of pass-train's; without it the untrained baseline is measured.
    """
    if not options["model"]:
        raise PassError("missing --model; pass-train evaluate --help lists the options")
    values = _temperatures(temperatures)
    interrupt_on_signals()
    _quiet_libraries()
    from pass_trainer import held_out
    from pass_trainer.figures import in_json
    from pass_trainer.record import check_recordable, record_figures

    config = held_out.EvaluateConfig(**options, prompts=prompts or held_out.PROMPTS, temperatures=values)
    if record:
        check_recordable(config)
    with Terminal(Console(stderr=True)) as progress:
        found = held_out.evaluate(config, progress)
    report = config.as_json() | {"temperatures": in_json(found)}
    if record:
        record_figures(config, report)
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print_figures(report)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(float(value) for value in text.split(",")))
    except ValueError:
        raise PassError(f"--temperatures must list numbers, as in 0,0.8, not {text!r}") from None


def _print_figures(report: dict[str, Any]) -> None:
    from pass_trainer.tables import HEADINGS, rows_of

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading in HEADINGS[:4])
    for row in rows_of(report):
        table.add_row(*row)
    console = Console(stderr=True)
    console.width = console.width if console.is_terminal else WIDTH
    console.print(table)


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    silence_libraries()


def _print_table(rows: list[tuple[str, Any]], lookahead: int) -> None:
    table = Table()
    for heading in ("", "places", f"agreement at 1..{lookahead}", "accepted", "tau two-pass", "tau fused"):
        table.add_column(heading, no_wrap=heading == "")
    for name, found in rows:
        tau = found.tau()
        match = " ".join(f"{value:.2f}" for value in found.match)
        table.add_row(
            name, str(found.places), match, f"{found.accepted:.2f}", f"{tau['two-pass']:.2f}", f"{tau['fused']:.2f}"
        )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
