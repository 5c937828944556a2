"""pass-run serve. `pass_runtime.cli.main` lists this command by its name and imports it if used."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from pass_runtime import LoadOptions
from pass_runtime.cli import flags as opts
from pass_runtime.commands.errors import OneLineCommand, importing, one_line_errors, require
from pass_server.flags import serve_options, server_options
from pass_server.serve_options import ListenOptions


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
