"""pass-run: generate | chat | batch | bench."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

import pass_runtime
from pass_runtime.cli import options as opts
from pass_runtime.cli.errors import Interrupted, interrupt_on_signals, one_line_errors
from pass_runtime.decode.draft_policy import DRAFTS
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pass_runtime.__version__, prog_name="pass-run")
def main() -> None:
    """Run a PaSS bundle. The text is what plain decoding gives; plans only change how fast."""
    interrupt_on_signals()


@main.command()
@opts.BUNDLE
@click.option("-p", "--prompt", help="The prompt.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a UTF-8 file.")
@click.option("--chat", "as_chat", is_flag=True, help="Put the prompt into the model's chat template.")
@opts.generation_options
@opts.engine_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--explain", is_flag=True, help="With --plan auto: print what it knows and why it decided as it did.")
@one_line_errors
def generate(bundle: Path, prompt: str | None, prompt_file: Path | None, **options: Any) -> None:
    """Continue a prompt, given with -p, --prompt-file, or on standard input."""
    as_json, as_chat, explain = (options.pop(key) for key in ("as_json", "as_chat", "explain"))
    request = opts.generate_options(options)
    if explain and request.plan != "auto":
        raise PassError("--explain tells how --plan auto decides; use them together")
    text = read_prompt(prompt, prompt_file)
    session = opts.open_bundle(bundle, **options)
    generation = start(session, text, request, as_chat=as_chat)
    if as_json:
        click.echo(json.dumps(result(generation.run(), request), ensure_ascii=False))
    else:
        for piece in generation:
            click.echo(piece.text, nl=False)  # flushes
        click.echo()
        if sys.stderr.isatty():
            click.secho(summary(generation), err=True, dim=True)
    if explain:
        from pass_runtime.cli.explain import print_reasoning

        print_reasoning(session.tuner(request.sampling), request.lookahead)


@main.command()
@opts.BUNDLE
@click.option("--system", help="A system message before the conversation.")
@opts.generation_options
@opts.engine_options
@one_line_errors
def chat(bundle: Path, system: str | None, **options: Any) -> None:
    """Talk to the model. /reset starts over, /quit or Ctrl-D ends; Ctrl-C stops an answer."""
    request = opts.generate_options(options, reuse_prefix=True)
    session = opts.open_bundle(bundle, **options)
    opening = [{"role": "system", "content": system}] if system else []
    session.encode_chat([*opening, {"role": "user", "content": "?"}])  # refuse a bundle that cannot chat at once
    messages = list(opening)
    while True:
        line = _read_line()
        if line is None or line.strip() == "/quit":
            return
        if line.strip() == "/reset":
            messages = list(opening)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(session, messages, request)})


def _read_line() -> str | None:
    """The next line, or None at the end of input (Ctrl-D, Ctrl-C at the prompt)."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, Interrupted):
        return None


def _answer(session: Session, messages: list[dict[str, str]], request: GenerateOptions) -> str:
    generation = session.chat(messages, request)
    try:
        for piece in generation:
            click.echo(piece.text, nl=False)
    except Interrupted:
        click.echo(" [stopped]", nl=False, err=True)
    click.echo()
    if sys.stderr.isatty():
        click.secho(summary(generation), err=True, dim=True)
    return generation.text


def start(session: Session, prompt: str, request: GenerateOptions, *, as_chat: bool) -> Generation:
    if as_chat:
        return session.chat([{"role": "user", "content": prompt}], request)
    return session.generate(prompt, request)


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """-p, --prompt-file or standard input: one of them."""
    if prompt is not None and prompt_file is not None:
        raise PassError("give the prompt with -p or with --prompt-file, not both")
    if prompt is not None:
        return prompt
    try:
        if prompt_file is not None:
            return prompt_file.read_text(encoding="utf-8")
        if sys.stdin.isatty():
            click.echo("reading the prompt from the terminal; end it with Ctrl-D", err=True)
        return sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise PassError(f"cannot read the prompt from {prompt_file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"the prompt in {prompt_file or 'standard input'} is not UTF-8 text") from None


def result(generation: Generation, request: GenerateOptions) -> dict[str, Any]:
    """The JSON object of one finished generation."""
    return {
        "prompt_ids": generation.prompt_ids,
        "token_ids": generation.token_ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "seed": request.sampling.seed,
        "stats": generation.stats.as_dict(),
    }


def summary(generation: Generation) -> str:
    """One line about a generation, for people."""
    stats = generation.stats
    parts = [
        f"{stats.generated_tokens} tokens",
        f"{stats.decode_tokens_per_second:.1f} tokens/s",
        f"plan {stats.plan}",
        f"tau {stats.tau:.2f}",
        f"prefill {stats.prefill_seconds * 1e3:.0f} ms of {stats.prompt_tokens - stats.cached_tokens} tokens",
        f"finished by {generation.finish_reason}",
    ]
    return "[" + ", ".join(parts) + "]"


@main.command()
@opts.BUNDLE
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@opts.generation_options
@opts.engine_options
@one_line_errors
def batch(bundle: Path, requests: Path, results: Path, **options: Any) -> None:
    """Answer every line of a .jsonl file, in order. A stopped run continues where it was.

    A request is {"prompt": text} or {"messages": [...]}, with an optional "id" and any of max_new_tokens,
    temperature, top_k, top_p, seed, stop, plan, lookahead, draft, ignore_eos in place of the flags. Line n is sampled
    with --seed + n - 1 (default 0 + n - 1), so that equal prompts differ and a run can be repeated.
    """
    from pass_runtime.cli.batch import run_batch

    options["seed"] = options["seed"] or 0
    request = opts.generate_options(options)
    run_batch(lambda: opts.open_bundle(bundle, **options), requests, results, request)


@main.command()
@opts.BUNDLE
@click.option("-p", "--prompt", "prompts", multiple=True, help="A prompt; may be given several times.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help='.jsonl with {"prompt": text} on each line.')
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Per prompt, end-of-sequence ignored.")
@opts.sampling_options
@click.option("--plan", "plans", multiple=True, help="Plans to compare; the first is the measure.  [default: all]")
@click.option("--draft", "drafts", type=click.Choice(DRAFTS), multiple=True, help="Draft sources to compare.")
@click.option("--lookahead", type=int, multiple=True, help="Drafts per round.  [default: the bundle's L]")
@click.option("--repeat", type=int, default=3, show_default=True, help="Rounds; every round runs every plan once.")
@opts.engine_options
@click.option("--json", "as_json", is_flag=True, help="The measurements as JSON instead of a table.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the JSON here.")
@one_line_errors
def bench(bundle: Path, **options: Any) -> None:
    """Time plans against each other, in alternation; medians over rounds."""
    from pass_runtime.cli.bench import BenchOptions, run_bench

    as_json, output = options.pop("as_json"), options.pop("output")
    sampling = opts.sampling_params(*(options.pop(key) for key in ("temperature", "top_k", "top_p", "seed")))
    keys = ("prompts", "prompt_file", "max_new_tokens", "plans", "drafts", "lookahead", "repeat")
    request = BenchOptions(sampling=sampling, **{key: options.pop(key) for key in keys})
    run_bench(opts.open_bundle(bundle, **options), request, as_json=as_json, output=output)


if __name__ == "__main__":
    main()
