"""The flags of every command that starts a server, made from the tables of options."""

from __future__ import annotations

from typing import Any

import click

from pass_runtime.cli import flags as opts
from pass_server.serve_options import ListenOptions, ServeOptions, read_keys


def server_options(command: opts.F) -> opts.F:
    """Add the flags of the address, those of `ServeOptions`, and those for the session."""
    names = [name for name, field in ServeOptions.option_fields().items() if field.flag]
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
