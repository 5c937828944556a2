"""pass-run: the commands generate, chat, batch, serve, bench and inspect. Each reads its flags
here, and imports the module that does the work only when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

import pass_runtime
from pass_runtime.bundle.request_fields import DRAFT_SOURCES, REQUEST_FIELDS
from pass_runtime.cli import flags as opts
from pass_runtime.cli.prompt_io import print_json, print_pieces, print_summary, read_prompt
from pass_runtime.commands.errors import OneLineGroup, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.options import MAX_SLOTS, LoadOptions

OTHER_COMMANDS = {"serve": "pass_server.command:serve"}
"""Commands of packages that build on this one, imported when they are used or listed. The packages
that such a command needs come with the extra of its name."""


class _Commands(OneLineGroup):
    """The commands below and OTHER_COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *OTHER_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in OTHER_COMMANDS:
            return super().get_command(ctx, cmd_name)
        with importing(cmd_name):
            command: click.Command = resolve_name(OTHER_COMMANDS[cmd_name])
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pass_runtime.__version__, prog_name="pass-run")
def main() -> None:
    """Run a PaSS bundle. Plans change the speed, and the text stays that of plain decoding."""


@main.command()
@opts.BUNDLE
@click.option("-p", "--prompt", help="The prompt.")
@click.option(
    "--prompt-file",
    type=opts.PATH,
    help="UTF-8 file with the prompt; a line feed at its end is removed.",
)
@click.option(
    "--keep-newline",
    is_flag=True,
    help="Keep the line feed at the end of the file or of standard input.",
)
@click.option(
    "--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template."
)
@click.option("--system", help="With --chat: a system message before the prompt.")
@opts.generation_options
@opts.SEED
@opts.LOGPROBS
@opts.load_flags("logprobs_mode")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@opts.SHOW_DRAFTS
@click.option(
    "--explain",
    is_flag=True,
    help="With --plan auto: print which plans it compared, and their speed.",
)
@one_line_errors
def generate(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    keep_newline: bool,
    system: str | None,
    **options: Any,
) -> None:
    """Continue a prompt from -p or --prompt-file or, without these or for `--prompt-file -`, from
    standard input."""
    require("cpu")
    as_json, as_chat, explain, show_drafts = (
        options.pop(key) for key in ("as_json", "as_chat", "explain", "show_drafts")
    )
    request = opts.generate_options(options)
    if explain and request.plan != "auto":
        raise PassError(
            "--explain shows how --plan auto decides: use --plan auto, or leave out --explain"
        )
    if system is not None and not as_chat:
        raise PassError("--system goes into the model's chat template: add --chat")
    if request.logprobs is not None and not as_json:
        raise PassError("--logprobs is for JSON: add --json")
    if as_json:
        opts.refuse_given("JSON has no colours", "show_drafts")
    text = read_prompt(prompt, prompt_file, keep_newline=keep_newline)
    session = opts.open_bundle(bundle, LoadOptions(**options))
    if as_chat:
        opening = [{"role": "system", "content": system}] if system else []
        generation = session.chat([*opening, {"role": "user", "content": text}], request)
    else:
        generation = session.generate(text, request)
    if as_json:
        print_json(generation)
    else:
        print_pieces(generation, show_drafts=show_drafts)
        click.echo()
        print_summary(generation, show_drafts=show_drafts)
    if explain:
        from pass_runtime.cli.tables import print_reasoning

        print_reasoning(session.tuner(request.sampling), request.lookahead)


@main.command()
@opts.BUNDLE
@click.option("--system", help="A system message before the conversation.")
@click.option(
    "--context-overflow",
    type=click.Choice(["drop-oldest", "stop"]),
    default="drop-oldest",
    show_default=True,
    help="If a new message does not fit into the context: drop the oldest exchanges, or refuse "
    "the message. Room for --max-new-tokens, at most half of the context, is kept free. The "
    "system message is never dropped.",
)
@opts.generation_options
@opts.SEED
@opts.load_flags("prefix_cache")
@opts.SHOW_DRAFTS
@one_line_errors
def chat(
    bundle: Path, system: str | None, context_overflow: str, show_drafts: bool, **options: Any
) -> None:
    """Talk to the model, in a terminal or line by line from a pipe.

    /help lists the commands: /reset /system /save /load /quit. Ctrl-C stops an answer; at the
    prompt, Ctrl-C and Ctrl-D end the chat. A message that cannot be answered is reported and
    skipped; the status is then 2 at the end, if the messages come from a pipe or a file.
    """
    require("cpu")
    with importing():
        from pass_runtime.cli.chat_loop import ChatLoop, Conversation
    request = opts.generate_options(options, reuse_prefix=True)
    drop = context_overflow == "drop-oldest"
    session = opts.open_bundle(bundle, LoadOptions(**options))
    loop = ChatLoop(session, request, Conversation(system), drop=drop, show_drafts=show_drafts)
    failed = loop.run()
    if failed and not sys.stdin.isatty():
        sys.exit(2)


@main.command(
    epilog="Fields: "
    + ", ".join((*(field.name for field in REQUEST_FIELDS), *opts.CONSTRAINT_FIELDS))
    + "."
)
@opts.BUNDLE
@click.argument("requests", type=opts.PATH)
@click.argument("results", type=opts.PATH)
@opts.generation_options
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Line n is sampled with this seed + n - 1.",
)
@opts.LOGPROBS
@opts.load_flags("max_batch_size", "speculative_max_concurrency", "prefix_cache", "logprobs_mode")
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Answer the lines again whose result in RESULTS is an error.",
)
@click.option("--fail-on-error", is_flag=True, help="End with status 1 if any line failed.")
@one_line_errors
def batch(
    bundle: Path,
    requests: Path,
    results: Path,
    retry_failed: bool,
    fail_on_error: bool,
    **options: Any,
) -> None:
    """Answer every line of a .jsonl file, several together, with results in order. A run that was
    stopped goes on if it is started again.

    A line is {"prompt": text} or {"messages": [...]}, with an optional "id" and any of the fields
    below, which override the flags. "json_schema" and "grammar" are the schema and the grammar
    themselves, not names of files.

    If a line fails, its result has an "error", and the other lines are answered. The status is 1 if
    an error is not the line's fault ("unexpected": true), or, with --fail-on-error, if there is any
    error.

    `-` is standard input or standard output. Results that go to a pipe or a device cannot be
    continued. "line" in a result is the number of the line in REQUESTS, blank lines counted.
    """
    require("cpu")
    with importing():
        from pass_runtime.bundle.read import read_manifest
        from pass_runtime.cli.batch import model_identity, run_batch
    request = opts.generate_options(options)
    # `results_of` submits two lines per slot.
    loading = LoadOptions(**options, max_queue=2 * MAX_SLOTS)
    model = model_identity(bundle, read_manifest(bundle))
    tally = run_batch(
        requests,
        results,
        request,
        model,
        lambda: opts.open_bundle(bundle, loading),
        retry_failed=retry_failed,
    )
    if tally.unexpected or (tally.failed and fail_on_error):
        sys.exit(1)


@main.command()
@opts.BUNDLE
@click.option(
    "-p",
    "--prompt",
    "prompts",
    multiple=True,
    help="A prompt, without a chat template.  [default: nine prompts]",
)
@click.option("--prompt-file", type=opts.PATH, help='.jsonl with {"prompt": text} on each line.')
@click.option(
    "--max-new-tokens",
    type=int,
    default=48,
    show_default=True,
    help="Tokens per prompt; EOS is ignored.",
)
@opts.sampling_options
@click.option(
    "--plan",
    "plans",
    multiple=True,
    help="Plans to compare; ratios are to the first.  [default: see above]",
)
@click.option(
    "--draft",
    "drafts",
    type=click.Choice(DRAFT_SOURCES),
    multiple=True,
    help="Draft sources to compare.",
)
@click.option(
    "--lookahead", type=int, multiple=True, help="Drafts per pass.  [default: the bundle's L]"
)
@click.option(
    "--batch",
    "batches",
    help="Numbers of sequences to run together, as 1,2,4,8.  [default: one by one]",
)
@click.option(
    "--rows", help="Time not plans, but single passes of windows with 1,2,3,5,9 rows, for example."
)
@click.option(
    "--cached",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="With --rows: cached tokens.",
)
@click.option(
    "--repeat",
    type=int,
    default=3,
    show_default=True,
    help="Rounds; every round runs every plan once.",
)
@click.option(
    "--breakdown", is_flag=True, help="Also time single passes of each plan, trunk and tail."
)
@opts.load_flags()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "-o",
    "--output",
    type=opts.PATH,
    help="Also write JSON to this file after every round; to an .html file, tables at the end.",
)
@one_line_errors
def bench(bundle: Path, **options: Any) -> None:
    """Time plans against each other, in alternation, and report medians over rounds.

    By default the plans are plain decoding (ar), auto with look-ahead drafts only, and auto, on
    three chat, three text and three code prompts that no weights were trained on. The status is 1
    if the plans write different texts.

    Without --batch, prompts run one by one, and tokens/s is that of decoding, without prefill. With
    --batch it is that of all sequences together, with prefill. ms/pass never includes prefill. tau
    is tokens per pass.

    --breakdown adds columns. host: the part of ms/pass outside the engine. trunk, tail:
    milliseconds of single passes. cost: trunk and tail together, relative to a pass of ar.
    predicted: the speed if a pass took only trunk and tail.

    With --rows, every round times ten passes of each window, with and without look-ahead rows. The
    KV capacity is --capacity if given, else the smallest that holds --cached tokens and the window.
    """
    require("cpu")
    with importing():
        from pass_runtime.cli.bench import (
            BenchOptions,
            about,
            parse_sizes,
            run_bench,
            show_report,
            write_json,
        )
        from pass_runtime.cli.bench_rows import RowsOptions, measure_rows, print_rows
        from pass_runtime.cli.tables import print_plans
    as_json, output, cached = options.pop("as_json"), options.pop("output"), options.pop("cached")
    batches = parse_sizes("--batch", "sequences", "1,2,4,8", options.pop("batches"))
    rows = parse_sizes("--rows", "rows", "1,2,3,5,7,9,13,25", options.pop("rows"))
    sampling = opts.sampling_params(options)
    request = opts.take(BenchOptions, options, sampling=sampling, batches=batches)
    if request.repeat < 1:
        raise PassError(f"--repeat must be at least 1, not {request.repeat}")
    if rows and request.breakdown:
        raise PassError("--rows times trunk and tail separately in any case: leave out --breakdown")
    if rows and (request.plans or request.drafts or request.lookahead):
        raise PassError(
            "--rows times windows, not plans: leave out --plan, --draft and --lookahead"
        )
    if rows:
        opts.refuse_given("--rows writes no text", "max_new_tokens")
    else:
        opts.refuse_given("it is for --rows", "cached")
    whole_cache = options["capacity"] is not None
    rows_options = RowsOptions(
        request.sampling, rows, batches or (1,), cached, whole_cache, request.repeat
    )
    loading = LoadOptions(**options, max_batch_size=max(batches, default=1), prefix_cache=False)
    session = opts.open_bundle(bundle, loading)

    def save(report: dict[str, Any]) -> None:
        write_json(about(session) | report, output)

    if rows:
        report = measure_rows(session, rows_options, request.encoded(session).values(), save)
    else:
        report = run_bench(session, request, save)
    show_report(
        about(session) | report, print_rows if rows else print_plans, as_json=as_json, output=output
    )
    if report.get("differences"):
        sys.exit(1)


@main.command()
@opts.BUNDLE
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--verify", is_flag=True, help="Also read all files and check their hashes.")
@click.option(
    "--device", help="Run all passes on this GPU, and show which it captures as CUDA graphs."
)
@opts.flags_of(LoadOptions, "max_batch_size")
@one_line_errors
def inspect(
    bundle: Path, as_json: bool, verify: bool, device: str | None, max_batch_size: int | None
) -> None:
    """Show what a bundle holds, from its manifest. Only --verify reads other files, and only
    --device loads engines."""
    require("cpu")
    with importing():
        from pass_runtime.cli.inspect_bundle import run_inspect
    if device is None:
        opts.refuse_given("without --device no pass is run", "max_batch_size")
    run_inspect(
        bundle, as_json=as_json, verify=verify, device=device, max_batch_size=max_batch_size
    )


if __name__ == "__main__":
    main(prog_name="pass-run")
