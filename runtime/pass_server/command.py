"""pass-run serve. `pass_runtime.cli.main` lists this command by its name and imports it if used."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from pass_runtime import LoadOptions, options_of
from pass_runtime.cli import flags as opts
from pass_runtime.commands.errors import OneLineCommand, importing, one_line_errors, require
from pass_server.serve_options import ListenOptions, ServeOptions, read_keys


def server_options(command: opts.F) -> opts.F:
    """Add the flags of the address, those of `ServeOptions`, and those for the session."""
    names = [name for name, option in options_of(ServeOptions).items() if option.flag]
    return opts.combined(
        opts.flags_of(ListenOptions, "host", "port", "allow_no_key"),
        click.option(
            "--api-key-file",
            type=opts.PATH,
            help="File of API keys, one per line. Clients need one.",
        ),
        opts.flags_of(ServeOptions, *names),
        opts.load_flags("speculative_max_concurrency", "prefix_cache", "logprobs_mode"),
    )(command)


def serve_options(options: dict[str, Any]) -> ServeOptions:
    """Make ServeOptions of a command's options, which are removed from `options`."""
    key_file = options.pop("api_key_file")
    return opts.take(ServeOptions, options, keys=() if key_file is None else read_keys(key_file))


@click.command(cls=OneLineCommand)
@opts.BUNDLE
@server_options
@opts.flags_of(LoadOptions, "max_batch_size")
@opts.flags_of(ListenOptions, "max_connections", "drain_seconds")
@one_line_errors
def serve(bundle: Path, **options: Any) -> None:
    """Serve OpenAI's HTTP API, and a web page at / to try the model.

    After Ctrl-C or SIGTERM, running requests have --drain-seconds to finish.
    """
    require("cpu", "serve")
    with importing("serve"):
        from pass_server.server import run_server
    listening, serving = opts.take(ListenOptions, options), serve_options(options)
    loading = LoadOptions(**options)  # the options that are left
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    run_server(
        lambda: opts.open_bundle(bundle, loading),
        serving,
        listening,
        report=partial(click.echo, err=True),
    )
