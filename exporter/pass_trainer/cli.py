"""pass-train: the command line of `pass_trainer.run` and `pass_trainer.evaluation`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pass_exporter.options import model_flags
from pass_exporter.terminal import Terminal, silence_libraries
from pass_runtime.cli.flags import PATH, flags_of, refuse_given
from pass_runtime.cli.tables import show_table
from pass_runtime.commands.errors import OneLineGroup, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import to_json
from pass_runtime.measuring.real_use import KINDS, parse_kinds, parse_temperatures
from pass_trainer.config import Recipe, TrainConfig
from pass_trainer.corpus import SELF_NAME

DATA = click.option(
    "--data",
    multiple=True,
    type=PATH,
    help="Source of prompts: a text file, a directory, JSON lines, or `self` (default), with which "
    "the model writes prompts. Repeatable; each source gives the same number of prompts.",
)
MODEL = click.option(
    "--model", help="Registry name, hub id (owner/name), local directory, or .gguf file."
)
TABLE_CHARACTERS = 110
"""Characters in a line of a table if stderr is not a terminal."""


@click.group(
    cls=OneLineGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@MODEL
@model_flags
@DATA
@click.option(
    "-o", "--output", type=PATH, help="Directory for weights, metrics, curves and model card."
)
@flags_of(
    TrainConfig,
    *("lookahead", "adapter", "rank", "adapter_from", "head", "head_rank", "head_width", "start"),
    *("steps", "minutes", "batch", "anchors", "lr", "decay", "aim"),
)
@click.option(
    "--sequences",
    type=int,
    help="Number of sequences of training text.  [default: 1024; with --minutes as many as the "
    "model writes]",
)
@flags_of(TrainConfig, "held_out")
@click.option(
    "--sequence-length",
    type=int,
    default=256,
    show_default=True,
    help="Tokens per sequence, including its prompt.",
)
@click.option(
    "--prompt-tokens",
    type=(int, int),
    default=(16, 64),
    show_default=True,
    help="The fewest and the most tokens of a prompt that is an excerpt.",
)
@click.option(
    "--chat-share",
    type=float,
    default=0.25,
    show_default=True,
    help="Share of excerpts that become a chat message.",
)
@click.option(
    "--temperatures",
    metavar="T,T,...",
    default="0,0.8,1",
    show_default=True,
    help="Temperatures of training text. It is written in shards (of 64 sequences on a CPU), each "
    "with the next temperature; 0 is greedy.",
)
@flags_of(
    TrainConfig,
    *("write_with", "seed", "dtype", "device", "resume", "checkpoint_minutes"),
)
@click.pass_context
@one_line_errors
def main(context: click.Context, /, **options: Any) -> None:
    """Train look-ahead embeddings, and optionally an adapter and a draft head, for a frozen model.

    Several GPUs: torchrun --nproc-per-node N -m pass_trainer ...
    """
    if context.invoked_subcommand is not None:
        return
    for name in ("model", "output"):
        if not options[name]:
            raise PassError(f"missing --{name}; pass-train --help lists the options")
    _refuse_unused_options(options)
    require("cpu", "train")
    _quiet_libraries()
    # --help and errors in options should not wait for the import of torch, which takes seconds.
    with importing("train"):
        from pass_trainer.checkpoint import planned_length
        from pass_trainer.run import is_main, run
    if options["steps"] is None and options["minutes"] is None:
        # A resumed run goes on to the --steps or --minutes that its checkpoint has.
        run_length = planned_length(options["output"]) if options["resume"] else {}
        options |= run_length or {"steps": TrainConfig.steps}
    try:
        temperatures = tuple(map(float, options.pop("temperatures").split(",")))
    except ValueError:
        raise PassError("--temperatures must list numbers, as in 0,0.8,1") from None
    sequences = options.pop("sequences")
    if sequences is None and options["minutes"] is None:
        sequences = Recipe.sequences
    recipe = Recipe(
        sequences=sequences,
        length=options.pop("sequence_length"),
        prompt=options.pop("prompt_tokens"),
        temperatures=temperatures,
        chat=options.pop("chat_share"),
        seed=options["seed"],
    )
    data = options.pop("data") or (Path(SELF_NAME),)
    config = TrainConfig(**options, data=data, recipe=recipe)
    try:
        with Terminal(Console(stderr=True), show=is_main()) as progress:
            report = run(config, progress)
    except KeyboardInterrupt:
        click.echo(
            f"the same command with --resume continues from the last checkpoint in {config.output}",
            err=True,
        )
        raise
    if is_main():
        _print_agreement("held-out sequences, greedy", report.agreement, config.lookahead)
        click.echo(report.weights)


@main.command()
@click.argument("weights", type=PATH, required=False)
@MODEL
@model_flags
@click.option(
    "--prompts", type=PATH, help='JSON lines with "id", "kind" (see --kinds) and "prompt".'
)
@click.option(
    "--kinds", default=",".join(KINDS), show_default=True, help="Kinds of prompts to answer."
)
@click.option(
    "--each", type=click.IntRange(1), help="Number of prompts of each kind.  [default: all]"
)
@click.option(
    "--tokens", type=int, default=128, show_default=True, help="Tokens to measure per answer."
)
@click.option(
    "--temperatures",
    default="0,0.8,1.0",
    show_default=True,
    help="Temperatures to measure; 0 is greedy.",
)
@click.option(
    "--top-k", type=int, default=0, show_default=True, help="Top-k of sampled answers; 0 is off."
)
@flags_of(TrainConfig, "lookahead")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32"]),
    default="fp32",
    show_default=True,
    help="Dtype of the model.",
)
@flags_of(TrainConfig, "device")
@click.option(
    "--record", is_flag=True, help="Write the results into WEIGHTS and the model card beside it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to standard output.")
@one_line_errors
def evaluate(
    as_json: bool, record: bool, prompts: Path | None, kinds: str, temperatures: str, **options: Any
) -> None:
    """Measure the acceptance of drafts, and tokens per pass, on answers to kinds of prompts.

    WEIGHTS is a file that pass-train wrote. Default: the untrained baseline, the mean of all token
    embeddings.
    """
    if not options["model"]:
        raise PassError("missing --model; pass-train evaluate --help lists the options")
    options["kinds"], options["temperatures"] = parse_kinds(kinds), parse_temperatures(temperatures)
    require("cpu", "export")
    _quiet_libraries()
    with importing("export"):
        from pass_trainer.evaluation import evaluate as evaluation
        from pass_trainer.evaluation.card import check_recordable, write_results
        from pass_trainer.evaluation.counts import report_as_json
    config = evaluation.EvaluateConfig(**options, prompts=prompts or evaluation.PROMPTS)
    if record:
        check_recordable(config)
    with Terminal(Console(stderr=True)) as progress:
        counts = evaluation.evaluate(config, progress)
    report = config.as_json() | {"temperatures": report_as_json(counts)}
    if record:
        write_results(config, report)
    if as_json:
        click.echo(to_json(report))
    else:
        _print_evaluation(report)


def _print_evaluation(report: dict[str, Any]) -> None:
    from pass_trainer.evaluation.card import HEADINGS, rows_of

    table = Table(box=None, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        # Cells of the first four columns have spaces, at which they would wrap.
        table.add_column(heading, no_wrap=heading in HEADINGS[:4])
    for row in rows_of(report):
        table.add_row(*row)
    console = Console(stderr=True)
    console.width = console.width if console.is_terminal else TABLE_CHARACTERS
    show_table(console, table)


def _refuse_unused_options(options: dict[str, Any]) -> None:
    if options["adapter"] == "none":
        refuse_given("there is no adapter without --adapter lora", "rank", "adapter_from")
    if not options["head"]:
        refuse_given("there is no draft head without --head", "head_rank", "head_width")
    if set(options["data"]) <= {Path(SELF_NAME)}:  # No --data means `self`, too.
        refuse_given("the model writes whole prompts (see --data)", "prompt_tokens", "chat_share")


def _quiet_libraries() -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    silence_libraries()


def _print_agreement(name: str, agreement: Any, lookahead: int) -> None:
    table = Table()
    headings = ("", "places", f"agreement at 1..{lookahead}", "accepted")
    for heading in (*headings, "tau two-pass", "tau fused"):
        table.add_column(heading, no_wrap=heading == "")
    match = " ".join(f"{value:.2f}" for value in agreement.match)
    tau = (f"{value:.2f}" for plan, value in agreement.tau().items() if plan != "ar")
    table.add_row(name, str(agreement.places), match, f"{agreement.accepted:.2f}", *tau)
    show_table(Console(stderr=True), table)


if __name__ == "__main__":
    main()
