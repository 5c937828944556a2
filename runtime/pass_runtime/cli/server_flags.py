"""The flags of a server: those of `pass-run serve`, which scripts/serve_ray.py has, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pass_runtime.cli import flags as opts

if TYPE_CHECKING:
    from pass_server.serve_options import ServeOptions


def server_options(command: opts.F) -> opts.F:
    """The flags of an address, of every field of `ServeOptions` that has one, and of a session that serves."""
    return opts.combined(
        click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on."),
        click.option("--port", type=int, default=8000, show_default=True, help="The port. 0: any free one."),
        click.option("--api-key-file", type=opts.PATH, help="File of API keys, one per line. Clients need one."),
        click.option("--allow-no-key", is_flag=True, help="Allow a --host that other machines reach, without keys."),
        click.option("--served-model-name", "model_name", help="The model's name.  [default: its name in the bundle]"),
        click.option("--max-queue", default=64, show_default=True, help="Sequences that may wait; more get a 429."),
        click.option("--max-prompt-tokens", type=int, help="Most tokens of a prompt.  [default: the KV capacity]"),
        click.option("--max-output-tokens", type=int, help="Most tokens of an answer.  [default: the KV capacity]"),
        click.option("--max-body-bytes", type=int, default=1 << 20, show_default=True, help="Largest request body."),
        _seconds("--request-seconds", 600, "Limit for request and answer."),
        _seconds("--client-seconds", 20, "Limit for a client to send or read."),
        _seconds("--keep-alive-seconds", 15, "Silence of a stream before a comment."),
        click.option("--cors-origin", "cors_origins", multiple=True, help="Origin of pages that may use it; or *."),
        click.option("--reuse-prefix", is_flag=True, help="Share K/V of prefixes on GPUs too, which changes rounding."),
        _off("--no-client-plan", "client_plans", "Refuse requests that name a plan or set speculative to false."),
        _off("--no-page", "page", "Do not serve the web page at /."),
        click.option("--allow-special-tokens", "special_tokens", is_flag=True, help="Let messages contain them."),
        _parser("--tool-call-parser", "auto, none, hermes, llama3_json, mistral."),
        _parser("--reasoning-parser", "auto, none, or think: <think>...</think>."),
        opts.SPECULATIVE_MAX_CONCURRENCY,
        opts.NO_PREFIX_CACHE,
        opts.LOGPROBS_MODE,
    )(command)


def serve_options(options: dict[str, Any]) -> ServeOptions:
    """The `ServeOptions` of a command's options, which are removed from `options`."""
    from pass_server.serve_options import ServeOptions, read_keys

    file = options.pop("api_key_file")
    return opts.take(ServeOptions, options, keys=read_keys(file) if file is not None else ())


def _seconds(flag: str, default: float, help: str) -> Callable[[opts.F], opts.F]:
    return click.option(flag, type=float, default=default, show_default=True, help=help)


def _off(flag: str, name: str, help: str) -> Callable[[opts.F], opts.F]:
    """A flag that sets `name` to False."""
    return click.option(flag, name, is_flag=True, flag_value=False, default=True, help=help)


def _parser(flag: str, help: str) -> Callable[[opts.F], opts.F]:
    return click.option(flag, default="auto", show_default=True, help=help)
