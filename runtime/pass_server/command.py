"""pass-run serve: the command of this package, which `pass-run` lists among its own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from pass_runtime import PassError
from pass_runtime.cli import flags as opts
from pass_runtime.commands.errors import OneLineCommand, importing, one_line_errors
from pass_server.serve_options import ServeOptions, read_keys


@click.command(cls=OneLineCommand)
@opts.BUNDLE
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="The port. 0: any free one; it is printed.")
@click.option("--api-key-file", type=opts.PATH, help="File of API keys, one per line. Clients need one.")
@click.option("--allow-no-key", is_flag=True, help="Allow a --host that other machines reach, without keys.")
@click.option("--served-model-name", "model_name", help="What clients call the model.  [default: the bundle's name]")
@opts.MAX_BATCH_SIZE
@click.option("--max-queue", default=64, show_default=True, help="Sequences that may wait; more get status 429.")
@click.option("--max-prompt-tokens", type=int, help="Most tokens of a prompt.  [default: the KV capacity]")
@click.option("--max-output-tokens", type=int, help="Most tokens of an answer.  [default: the KV capacity]")
@click.option("--max-body-bytes", type=int, default=1 << 20, show_default=True, help="Largest request body.")
@click.option("--max-connections", type=int, default=512, show_default=True, help="Beyond these, idle ones are closed.")
@click.option("--request-seconds", type=float, default=600, show_default=True, help="Limit for request and answer.")
@click.option("--client-seconds", type=float, default=20, show_default=True, help="Limit for a client to send or read.")
@click.option("--drain-seconds", type=float, default=30, show_default=True, help="To finish requests after SIGTERM.")
@click.option("--keep-alive-seconds", type=float, default=15, show_default=True, help="Silence before a comment.")
@click.option("--cors-origin", "cors_origins", multiple=True, help="Origin of web pages that may use the server; or *.")
@click.option("--reuse-prefix", is_flag=True, help="Share K/V of prefixes on GPUs too, which changes rounding.")
@click.option(
    "--no-client-plan",
    "client_plans",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Refuse requests that name a plan or set speculative to false.",
)
@click.option("--no-page", "page", is_flag=True, flag_value=False, default=True, help="Do not serve the web page at /.")
@click.option("--allow-special-tokens", "special_tokens", is_flag=True, help="Let messages contain special tokens.")
@opts.SPECULATIVE_MAX_CONCURRENCY
@opts.NO_PREFIX_CACHE
@opts.LOGPROBS_MODE
@click.option("--tool-call-parser", default="auto", show_default=True, help="auto, none, hermes, llama3_json, mistral.")
@click.option("--reasoning-parser", default="auto", show_default=True, help="auto, none, or think: <think>...</think>.")
@opts.engine_options
@one_line_errors
def serve(bundle: Path, **options: Any) -> None:
    """Serve OpenAI's HTTP API, and a web page at / to try the model.

    After Ctrl-C or SIGTERM, running requests have --drain-seconds to finish.
    """
    try:
        with importing():
            from pass_server.server import ListenOptions, run_server
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise PassError(f"{missing} is not installed: pip install 'pass-toolkit[serve]'") from None
    key_file = options.pop("api_key_file")
    where = opts.take(ListenOptions, options)
    serve_options = opts.take(ServeOptions, options, keys=read_keys(key_file) if key_file is not None else ())
    opened = opts.load_options(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    run_server(
        lambda: opts.open_bundle(bundle, opened), serve_options, where, report=lambda line: click.echo(line, err=True)
    )
