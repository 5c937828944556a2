"""The flags of every command that serves, made from the table `ServeOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import click

from pass_runtime.cli import flags as opts
from pass_server.serve_options import ServeOptions, read_keys

TYPES = {"int": int, "float": float, "str": str}
"""The type of a flag's value, by the first word of its field's annotation."""
FIELDS = {each.name: each for each in fields(ServeOptions) if each.metadata}
"""The fields with a flag."""


def field_option(name: str, *, unset: bool = False) -> Callable[[opts.F], opts.F]:
    """The flag of a field of `ServeOptions`. unset: without the flag, the value is None."""
    field = FIELDS[name]
    default, flag = field.default, field.metadata["flag"] or f"--{name.replace('_', '-')}"
    help, shown_default = field.metadata["help"], field.metadata["if_none"]
    if shown_default is None and unset and default:
        shown_default = str(default)
    if shown_default is not None:
        help += f"  [default: {shown_default}]"
    if isinstance(default, bool):
        value, default = not default, None if unset else default
        return click.option(flag, name, is_flag=True, flag_value=value, default=default, help=help)
    if isinstance(default, tuple):
        return click.option(flag, name, multiple=True, help=help)
    kind = TYPES[str(field.type).partition(" ")[0]]
    if unset or default is None:
        return click.option(flag, name, type=kind, help=help)
    return click.option(flag, name, type=kind, default=default, show_default=True, help=help)


def server_options(command: opts.F) -> opts.F:
    """The flags of an address, of `ServeOptions`, and of a session that serves."""
    return opts.combined(
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="The address to listen on."
        ),
        click.option(
            "--port", type=int, default=8000, show_default=True, help="The port. 0: any free one."
        ),
        click.option(
            "--api-key-file",
            type=opts.PATH,
            help="File of API keys, one per line. Clients need one.",
        ),
        click.option(
            "--allow-no-key",
            is_flag=True,
            help="Allow a --host that other machines reach, without keys.",
        ),
        *map(field_option, FIELDS),
        opts.SPECULATIVE_MAX_CONCURRENCY,
        opts.NO_PREFIX_CACHE,
        opts.LOGPROBS_MODE,
    )(command)


def serve_options(options: dict[str, Any]) -> ServeOptions:
    """Make ServeOptions of a command's options, and remove these from `options`."""
    file = options.pop("api_key_file")
    return opts.take(ServeOptions, options, keys=() if file is None else read_keys(file))
