"""pass-run. The command `generate` is here; others are imported when they are used or listed."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click

import pass_runtime
from pass_runtime.cli import flags as opts
from pass_runtime.cli.prompt_io import print_json, print_pieces, print_summary, read_prompt
from pass_runtime.commands.errors import OneLineGroup, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.options import LoadOptions

COMMANDS = {
    "batch": "pass_runtime.cli.batch:batch",
    "bench": "pass_runtime.cli.bench:bench",
    "chat": "pass_runtime.cli.chat_loop:chat",
    "inspect": "pass_runtime.cli.inspect_bundle:inspect",
    "serve": "pass_server.command:serve",
}
EXTRAS = ("serve",)
"""The commands whose packages come with the extra of that name."""


class _Commands(OneLineGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        with importing(cmd_name if cmd_name in EXTRAS else None):
            command: click.Command = resolve_name(COMMANDS[cmd_name])
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


if __name__ == "__main__":
    main(prog_name="pass-run")
