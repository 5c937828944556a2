"""pass-train: the command line of `pass_trainer.run` and `pass_trainer.evaluation`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pass_exporter.options import model_flags
from pass_exporter.terminal import Terminal, silence_libraries
from pass_runtime.cli.flags import PATH, flags_of, refuse_given, take
from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import OneLineGroup, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import to_json
from pass_runtime.measuring.real_use import KINDS, parse_kinds, parse_temperatures
from pass_trainer.config import PROMPTS, EvaluateConfig, Recipe, TrainConfig
from pass_trainer.corpus import SELF_NAME

DATA = click.option(
    "--data",
    multiple=True,
    type=PATH,
    help="Source of prompts: a text file, a directory, JSON lines, or `self` (default), with which "
    "the model writes prompts. Repeatable; each source gives the same number of prompts.",
)
TABLE_CHARACTERS = 110
"""Characters in a line of a table if stderr is not a terminal."""


@click.group(
    cls=OneLineGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
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
@flags_of(Recipe, "sequences")
@flags_of(TrainConfig, "held_out")
@flags_of(Recipe, "sequence_length")
@click.option(
    "--prompt-tokens",
    type=(int, int),
    default=Recipe.prompt_tokens,
    show_default=True,
    help="The fewest and the most tokens of a prompt that is an excerpt.",
)
@flags_of(Recipe, "chat_share")
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
        options["temperatures"] = tuple(map(float, options["temperatures"].split(",")))
    except ValueError:
        raise PassError("--temperatures must list numbers, as in 0,0.8,1") from None
    if options["sequences"] is None and options["minutes"] is None:
        options["sequences"] = Recipe.sequences
    seed = options["seed"]
    recipe = take(Recipe, options)
    data = options.pop("data") or (Path(SELF_NAME),)
    config = TrainConfig(**options, seed=seed, data=data, recipe=recipe)
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
        _print_agreement(report.agreement, config.lookahead)
        click.echo(report.weights)


@main.command()
@click.argument("weights", type=PATH, required=False)
@model_flags
@click.option(
    "--prompts", type=PATH, help='JSON lines with "id", "kind" (see --kinds) and "prompt".'
)
@click.option(
    "--kinds", default=",".join(KINDS), show_default=True, help="Kinds of prompts to answer."
)
@flags_of(EvaluateConfig, "each", "tokens")
@click.option(
    "--temperatures",
    default="0,0.8,1.0",
    show_default=True,
    help="Temperatures to measure; 0 is greedy.",
)
@flags_of(EvaluateConfig, "top_k", "lookahead", "dtype", "device")
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
    config = EvaluateConfig(**options, prompts=prompts or PROMPTS)
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

    console = Console(stderr=True)
    console.width = console.width if console.is_terminal else TABLE_CHARACTERS
    rows = [dict(zip(HEADINGS, row, strict=True)) for row in rows_of(report)]
    show_rows("", rows, HEADINGS[:4], console)


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


def _print_agreement(agreement: Any, lookahead: int) -> None:
    tau = agreement.tau()
    cells = {
        "places": str(agreement.places),
        f"agreement at 1..{lookahead}": " ".join(f"{value:.2f}" for value in agreement.match),
        "accepted": f"{agreement.accepted:.2f}",
        "tau two-pass": f"{tau['two-pass']:.2f}",
        "tau fused": f"{tau['fused']:.2f}",
    }
    show_rows("held-out sequences, greedy", [cells], console=Console(stderr=True))


if __name__ == "__main__":
    main()
