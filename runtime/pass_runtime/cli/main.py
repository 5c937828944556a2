"""pass-run: generate | chat | batch | serve | bench | inspect."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import pass_runtime
from pass_runtime.bundle.request_fields import DRAFTS, REQUEST_FIELDS
from pass_runtime.cli import flags as opts
from pass_runtime.cli.command_errors import OneLineGroup, importing, one_line_errors
from pass_runtime.cli.prompt_io import print_json, print_pieces, print_summary, read_prompt
from pass_runtime.errors import PassError
from pass_runtime.options import MAX_SLOTS


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pass_runtime.__version__, prog_name="pass-run")
def main() -> None:
    """Run a PaSS bundle. The text is what plain decoding gives; plans only change how fast."""


@main.command()
@opts.BUNDLE
@click.option("-p", "--prompt", help="The prompt.")
@click.option(
    "--prompt-file",
    type=click.Path(path_type=Path),
    help="Read the prompt from a UTF-8 file, or from standard input for `-`, without the line feed at its end.",
)
@click.option("--keep-newline", is_flag=True, help="Keep the line feed at the end of a file or of standard input.")
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", help="With --chat: a system message before the prompt.")
@opts.generation_options
@opts.SEED
@opts.LOGPROBS
@opts.LOGPROBS_MODE
@opts.engine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@opts.SHOW_DRAFTS
@click.option("--explain", is_flag=True, help="With --plan auto: print what it measured and how it chose.")
@one_line_errors
def generate(
    bundle: Path, prompt: str | None, prompt_file: Path | None, keep_newline: bool, system: str | None, **options: Any
) -> None:
    """Continue a prompt, given with -p, --prompt-file, or on standard input."""
    as_json, as_chat, explain, show_drafts = (
        options.pop(key) for key in ("as_json", "as_chat", "explain", "show_drafts")
    )
    request = opts.generate_options(options)
    if explain and request.plan != "auto":
        raise PassError("--explain shows how --plan auto decides; use them together")
    if system is not None and not as_chat:
        raise PassError("--system goes into the model's chat template: add --chat")
    if request.logprobs is not None and not as_json:
        raise PassError("--logprobs are part of the JSON object: add --json")
    if as_json:
        opts.refuse_given("JSON has no colours", "show_drafts")
    text = read_prompt(prompt, prompt_file, keep_newline=keep_newline)
    session = opts.open_bundle(bundle, opts.load_options(options))
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
    help="Once the conversation and --max-new-tokens (at most half of the context) exceed the context: forget the "
    "oldest exchanges, never the system message; or refuse the new message.",
)
@opts.generation_options
@opts.SEED
@opts.NO_PREFIX_CACHE
@opts.engine_options
@opts.SHOW_DRAFTS
@one_line_errors
def chat(bundle: Path, system: str | None, context_overflow: str, show_drafts: bool, **options: Any) -> None:
    """Talk to the model, in a terminal or line by line from a pipe.

    /help lists the commands: /reset /system /save /load /quit. Ctrl-C stops an answer; at the prompt it ends, as
    Ctrl-D does. A message that cannot be answered is reported, and the conversation goes on without it; where lines
    come from a pipe or a file, the status is then 2.
    """
    with importing():
        from pass_runtime.cli.chat_loop import ChatLoop, Conversation
    request, drop = opts.generate_options(options, reuse_prefix=True), context_overflow == "drop-oldest"
    session = opts.open_bundle(bundle, opts.load_options(options))
    failed = ChatLoop(session, request, Conversation(system), drop=drop, show_drafts=show_drafts).run()
    if failed and not sys.stdin.isatty():
        sys.exit(2)


@main.command(epilog=f"Fields: {', '.join((*(field.name for field in REQUEST_FIELDS), *opts.CONSTRAINT))}.")
@opts.BUNDLE
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@opts.generation_options
@click.option("--seed", type=int, default=0, show_default=True, help="Line n is sampled with this seed + n - 1.")
@opts.LOGPROBS
@opts.LOGPROBS_MODE
@opts.MAX_BATCH_SIZE
@opts.MAX_DRAFTING
@opts.NO_PREFIX_CACHE
@opts.engine_options
@click.option("--retry-failed", is_flag=True, help="Answer lines again whose result in RESULTS is an error.")
@click.option("--fail-on-error", is_flag=True, help="End with status 1 where any line failed.")
@one_line_errors
def batch(bundle: Path, requests: Path, results: Path, retry_failed: bool, fail_on_error: bool, **options: Any) -> None:
    """Answer every line of a .jsonl file, several at a time, in order. A stopped run continues where it was.

    A request is {"prompt": text} or {"messages": [...]}, with an optional "id" and any of the fields below in place of
    the flags; schema and grammar are no files there.

    A line that fails has an "error" as its result, and the others go on. The status is 1 where a line failed by no
    fault of its own ("unexpected"), and with --fail-on-error where any did.

    `-` is standard input and standard output. What is written to a pipe or a device cannot be continued. "line" in a
    result is the line of REQUESTS, blank ones counted.
    """
    with importing():
        from pass_runtime.bundle.read import read_manifest
        from pass_runtime.cli.batch import model_identity, run_batch
    request = opts.generate_options(options)
    opened = opts.load_options(options, max_queue=2 * MAX_SLOTS)  # a next line for every slot, however many there are
    model = model_identity(bundle, read_manifest(bundle))
    tally = run_batch(
        requests, results, request, model, lambda: opts.open_bundle(bundle, opened), retry_failed=retry_failed
    )
    if tally.unexpected or (tally.failed and fail_on_error):
        sys.exit(1)


@main.command()
@opts.BUNDLE
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="0: any that is free; it is printed.")
@click.option("--api-key-file", type=click.Path(path_type=Path), help="Keys, one a line, that clients have to show.")
@click.option("--allow-no-key", is_flag=True, help="Serve more than this machine without keys.")
@click.option("--served-model-name", "model_name", help="What clients call the model.  [default: the bundle's name]")
@opts.MAX_BATCH_SIZE
@click.option("--max-queue", type=int, default=64, show_default=True, help="Sequences that may wait; more get a 429.")
@click.option("--max-prompt-tokens", type=int, help="Most tokens of a prompt.  [default: the capacity]")
@click.option("--max-output-tokens", type=int, help="Most tokens of an answer.  [default: the capacity]")
@click.option("--max-body-bytes", type=int, default=1 << 20, show_default=True, help="Largest JSON of a request.")
@click.option("--max-connections", type=int, default=512, show_default=True, help="With more, idle ones are closed.")
@click.option("--request-seconds", type=float, default=600, show_default=True, help="Limit for a whole answer.")
@click.option("--client-seconds", type=float, default=20, show_default=True, help="Limit to send a request or read on.")
@click.option("--drain-seconds", type=float, default=30, show_default=True, help="For answers under way at SIGTERM.")
@click.option("--reuse-prefix", is_flag=True, help="Use the K/V of an earlier prompt again where both begin alike.")
@click.option(
    "--no-client-plan",
    "client_plans",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Refuse requests that name a plan, or turn speculation off.",
)
@click.option("--no-page", "page", is_flag=True, flag_value=False, default=True, help="Do not answer / with the page.")
@click.option(
    "--allow-special-tokens", "special_tokens", is_flag=True, help="Encode special tokens that messages spell as such."
)
@opts.MAX_DRAFTING
@opts.NO_PREFIX_CACHE
@opts.LOGPROBS_MODE
@click.option("--tool-call-parser", default="auto", show_default=True, help="auto, none, hermes, llama3_json, mistral.")
@click.option("--reasoning-parser", default="auto", show_default=True, help="auto, none, or think: <think>...</think>.")
@opts.engine_options
@one_line_errors
def serve(bundle: Path, **options: Any) -> None:
    """Answer HTTP requests as OpenAI's API does, and / with a page to try it.

    At Ctrl-C and SIGTERM, requests under way may finish.
    """
    try:
        with importing():
            from pass_server.serve_options import ServeOptions, read_keys
            from pass_server.server import ListenOptions, run_server
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise PassError(f"{missing} is not installed: pip install 'pass-toolkit[serve]'") from None
    key_file = options.pop("api_key_file")
    where = opts.take(ListenOptions, options)
    limits = opts.take(ServeOptions, options, keys=read_keys(key_file) if key_file is not None else ())
    opened = opts.load_options(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_server(lambda: opts.open_bundle(bundle, opened), limits, where, report=lambda line: click.echo(line, err=True))


@main.command()
@opts.BUNDLE
@click.option(
    "-p", "--prompt", "prompts", multiple=True, help="A prompt, taken as it is.  [default: nine held-out ones]"
)
@click.option("--prompt-file", type=click.Path(path_type=Path), help='.jsonl with {"prompt": text} on each line.')
@click.option("--max-new-tokens", type=int, default=48, show_default=True, help="Per prompt, end-of-sequence ignored.")
@opts.sampling_options
@click.option("--plan", "plans", multiple=True, help="Plans to compare; ratios are to the first.  [default: ar, auto]")
@click.option("--draft", "drafts", type=click.Choice(DRAFTS), multiple=True, help="Draft sources to compare.")
@click.option("--lookahead", type=int, multiple=True, help="Drafts per pass.  [default: the bundle's L]")
@click.option("--batch", "batches", help="Sequences at a time to compare, as 1,2,4,8.  [default: one by one]")
@click.option("--rows", help="Time passes by the rows of their windows, as 1,2,3,5,7,9,13,25, in place of plans.")
@click.option("--cached", type=click.IntRange(0), help="With --rows: tokens in the cache.  [default: 200]")
@click.option("--repeat", type=int, default=3, show_default=True, help="Rounds; every round runs every plan once.")
@click.option("--breakdown", is_flag=True, help="Also time each plan's passes alone: trunk, tail, predicted speed.")
@opts.engine_options
@click.option("--json", "as_json", is_flag=True, help="The measurements as JSON instead of a table.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Also write the JSON here, after every round; to a name.html the tables.",
)
@one_line_errors
def bench(bundle: Path, **options: Any) -> None:
    """Time plans against each other, in alternation, and report medians over rounds.

    Unless you say otherwise: plain decoding (ar), auto with look-ahead drafts only, and auto, on three chat, three text
    and three code prompts that no weights were trained on. The status is 1 if they do not write the same text.

    One by one, tokens/s are those of decoding, without prefill. With --batch they are of all sequences together, from
    the first prompt to the last token. ms/pass are of decoding, too. tau is tokens per pass.

    With --breakdown, host is the part of ms/pass outside the engine, trunk and tail are milliseconds of a plan's passes
    timed alone, cost is their sum relative to a pass of ar, and the prediction is the speed if passes took no longer.

    With --rows a round is ten passes of each window in a row, with look-ahead rows and without, and the cache is as
    long as --capacity if that is given.
    """
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
    keys = ("prompts", "prompt_file", "max_new_tokens", "plans", "drafts", "lookahead", "repeat", "breakdown")
    own = {key: options.pop(key) for key in keys}
    request = BenchOptions(sampling=opts.sampling_params(options), batches=batches, **own)
    if request.repeat < 1:
        raise PassError(f"--repeat must be at least 1, not {request.repeat}")
    if not rows and cached is not None:
        raise PassError("--cached is for --rows: add them")
    if rows and request.breakdown:
        raise PassError("--rows time trunk and tail apart already: leave out --breakdown")
    if rows and (request.plans or request.drafts or request.lookahead):
        raise PassError("--rows times windows, not plans: leave out --plan, --draft and --lookahead")
    if rows:
        opts.refuse_given("--rows writes no text", "max_new_tokens")
    by_rows = RowsOptions(request.sampling, rows, batches or (1,), repeat=request.repeat)
    if cached is not None:
        by_rows = replace(by_rows, cached=cached)
    by_rows = replace(by_rows, whole_cache=options["capacity"] is not None)
    opened = opts.load_options(options, max_batch_size=max(batches, default=1), prefix_cache=False)  # reads all prompts
    session = opts.open_bundle(bundle, opened)

    def save(report: dict[str, Any]) -> None:
        write_json(about(session) | report, output)

    if rows:
        measured = measure_rows(session, by_rows, request.encoded(session).values(), save)
    else:
        measured = run_bench(session, request, save)
    show_report(about(session) | measured, print_rows if rows else print_plans, as_json=as_json, output=output)
    if measured.get("differences"):
        sys.exit(1)


@main.command()
@opts.BUNDLE
@click.option("--json", "as_json", is_flag=True, help="Plain data instead of a table.")
@click.option("--verify", is_flag=True, help="Read all files and check their hashes.")
@click.option("--device", help="Run every pass on this GPU, and tell which are captured as CUDA graphs.")
@opts.MAX_BATCH_SIZE
@one_line_errors
def inspect(bundle: Path, as_json: bool, verify: bool, device: str | None, max_batch_size: int | None) -> None:
    """Show what a bundle holds. Without --device no engine is loaded, and only the manifest is checked."""
    with importing():
        from pass_runtime.cli.inspect_bundle import run_inspect
    if device is None:
        opts.refuse_given("without --device nothing is run", "max_batch_size")
    run_inspect(bundle, as_json=as_json, verify=verify, device=device, max_batch_size=max_batch_size)


if __name__ == "__main__":
    main(prog_name="pass-run")
