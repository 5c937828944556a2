"""Flags about the model that pass-export and pass-train share."""

from __future__ import annotations

from typing import Any

import click

from pass_exporter.model.registry import NO_REMOTE_CODE


def _refuse(_context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    if is_given:
        raise click.UsageError(f"{parameter.opts[0]} is refused: {NO_REMOTE_CODE}")


MODEL = click.option(
    "--model", help="Registry name, hub id (owner/name), local directory, or .gguf file."
)
REVISION = click.option(
    "--revision",
    metavar="REV",
    help="Branch, tag or commit of a model of the hub.  [default: main]",
)
TRUST_REMOTE_CODE = click.option(
    "--trust-remote-code", is_flag=True, hidden=True, expose_value=False, callback=_refuse
)


def model_flags(command: Any) -> Any:
    """Add --model, --revision, and a hidden --trust-remote-code that is refused with a reason."""
    return MODEL(REVISION(TRUST_REMOTE_CODE(command)))
