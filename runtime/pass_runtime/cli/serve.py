"""pass-run serve: from flags to a server that listens."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pass_runtime.cli import options as opts
from pass_runtime.cli.errors import importing
from pass_runtime.errors import PassError


@dataclass(frozen=True)
class Listening:
    """Where the server listens, for how many connections, and how long it drains."""

    host: str
    port: int
    max_connections: int
    drain_seconds: float


def run_serve(bundle: Path, options: dict[str, Any]) -> None:
    """Serve until a signal ends it. options: those of the command, the engine options included."""
    try:
        with importing():
            from pass_server.app import make_app
            from pass_server.options import ServeOptions, check_exposure, read_keys
            from pass_server.server import listen, serve
    except ModuleNotFoundError as error:
        raise PassError(f"{error.name} is not installed: pip install 'pass-toolkit[serve]'") from None
    own = {key: options.pop(key) for key in ("host", "port", "max_connections", "drain_seconds")}
    where, keys = Listening(**own), options.pop("api_key_file")
    allow_no_key = options.pop("allow_no_key")
    limits = ("max_queue", "max_prompt_tokens", "max_output_tokens", "max_body_bytes")
    seconds = ("request_seconds", "client_seconds")
    allowed = ServeOptions(
        keys=read_keys(keys) if keys is not None else (),
        reuse_prefix=options.pop("reuse_prefix"),
        client_plans=not options.pop("no_client_plan"),
        special_tokens=options.pop("allow_special_tokens"),
        **{
            name: options.pop(name)
            for name in ("model_name", *limits, *seconds, "tool_call_parser", "reasoning_parser")
        },
    )
    opened = opts.load_options(options)
    if where.max_connections < 1 or not 0 <= where.drain_seconds < float("inf"):
        raise PassError("max-connections must be at least 1, and drain-seconds at least 0")
    check_exposure(where.host, allowed.keys, allow_no_key=allow_no_key)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    listening = listen(where.host, where.port)
    with listening, opts.open_bundle(bundle, opened) as session:
        if session.chat_template is not None:
            session.chat_template.check()
        session.warm_up()
        app = make_app(session, allowed)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        line = f"{app.state.service.model} is served at {address}/v1"
        serve(app, listening, where.max_connections, where.drain_seconds, ready=lambda: click.echo(line, err=True))
