"""Serves a bundle from replicas on a Ray cluster, or answers a batch there.

    pip install 'pass-toolkit[cpu,serve,ray]'
    python scripts/on_ray.py serve build/smollm2-135m --replicas 2 --max-replicas 8
    python scripts/on_ray.py batch build/smollm2-135m in.jsonl out.jsonl --actors 8

The script joins the cluster of RAY_ADDRESS, or starts one. The bundle must be at the same path on
every node. Ray replaces a replica or actor that dies: a replica's requests fail with status 500,
which clients should retry (the openai package does); an actor's lines are answered again. A batch
that was stopped begins again.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pass_runtime import Session, load
from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.open import gpus_of_replica
from pass_runtime.cli import flags as opts
from pass_runtime.cli.batch_session import results_of
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.commands.errors import one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import Line, replacing, to_json
from pass_runtime.options import GenerateOptions, LoadOptions
from pass_server.command import serve_options, server_options
from pass_server.serve_options import ServeOptions, check_exposure

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
BLOCK_LINES_PER_SLOT = 8


def load_options_of(options: dict[str, Any]) -> LoadOptions:
    """Ray is asked for the threads: one if the flag is not given."""
    chosen = LoadOptions(**options)
    gpus_of_replica(chosen.device)  # refuses `cuda:1`: Ray chooses the GPU
    return replace(chosen, threads=chosen.threads or 1)


def start_ray(level: int) -> None:
    import ray

    ray.init(include_dashboard=False, log_to_driver=False, logging_level=level)


@click.group()
def main() -> None:
    """Serve a bundle, or answer a batch, on a Ray cluster."""


def deployment(
    bundle: Path,
    load_options: LoadOptions,
    slots: int,
    options: ServeOptions,
    scaling: dict[str, int],
) -> Any:
    """Return a Ray Serve deployment. slots: of a replica. scaling: `min_replicas` and
    `max_replicas`."""
    from ray import serve

    def app() -> Any:
        """In the replica's process."""
        from pass_server.app import make_app

        session = load(bundle, load_options)
        if session.chat_template is not None:
            session.chat_template.check()
        session.warm_up()
        return make_app(session, options)

    @serve.deployment(
        name="pass",
        ray_actor_options={
            "num_cpus": load_options.threads,
            "num_gpus": gpus_of_replica(load_options.device),
        },
        autoscaling_config={**scaling, "target_ongoing_requests": slots},
        max_ongoing_requests=slots + options.max_queue,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=1,
        graceful_shutdown_timeout_s=30,
    )
    @serve.ingress(app)
    class Replica:
        def check_health(self) -> None:
            """Raise if the session was closed by an error; Ray then replaces the replica."""
            if self.app.state.service.session.closed:  # type: ignore[attr-defined]
                raise RuntimeError("the session is closed")

    return Replica


@main.command("serve")
@opts.BUNDLE
@server_options
@click.option("--replicas", default=1, show_default=True, help="Fewest replicas.")
@click.option("--max-replicas", type=int, help="Most replicas.  [default: --replicas]")
@click.option(
    "--max-batch-size", default=DEFAULT_BATCH, show_default=True, help="Slots per replica."
)
@one_line_errors
def serve_replicas(
    bundle: Path, host: str, port: int, allow_no_key: bool, replicas: int, **options: Any
) -> None:
    """Serve BUNDLE from replicas until Ctrl-C or SIGTERM. Each replica uses --threads CPUs
    (default: 1), and a GPU if --device names one. The options are those of pass-run serve; limits
    and queues are per replica."""
    max_replicas, slots = options.pop("max_replicas") or replicas, options["max_batch_size"]
    if not 1 <= replicas <= max_replicas or slots < 1:
        raise PassError(
            "--replicas and --max-batch-size must be at least 1, and --max-replicas at least "
            "--replicas"
        )
    limits = serve_options(options)  # leaves the fields of LoadOptions
    load_options = load_options_of(options)
    check_exposure(host, limits.keys, allow_no_key=allow_no_key)
    require("cpu", "ray", "serve")
    import ray
    from ray import serve

    # Opened here too, so that errors of the bundle do not only appear in a replica's log.
    opts.open_bundle(bundle, load_options).close()
    scaling = {"min_replicas": replicas, "max_replicas": max_replicas}
    server = deployment(bundle.absolute(), load_options, slots, limits, scaling)
    start_ray(logging.WARNING)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(server.bind(), name="pass", route_prefix="/")
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has replaced the handlers.
            signal.signal(number, signal.default_int_handler)
        range_of_replicas = f"{replicas} to {max_replicas} replicas"
        click.echo(f"served at http://{host}:{port}/v1 by {range_of_replicas}", err=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        click.echo("shutting down", err=True)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            # A second signal must not interrupt the shutdown.
            signal.signal(number, signal.SIG_IGN)
        serve.shutdown()
        ray.shutdown()


class Answerer:
    """A Ray actor with a session of its own."""

    def __init__(
        self, bundle: Path, content_hash: str, load_options: LoadOptions, defaults: GenerateOptions
    ) -> None:
        self._bundle, self._content_hash = bundle, content_hash
        self._load_options, self._defaults = load_options, defaults
        self._session: Session | None = None

    def __call__(self, block: dict[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Map columns `number` and `text` of lines to `result`, JSON."""
        columns = zip(block["number"], block["text"], strict=True)
        lines = [Line(int(number), str(text)) for number, text in columns]
        answers = zip(lines, results_of(self._open, lines, self._defaults), strict=True)
        return {"result": [to_json({"line": line.number, **answer}) for line, answer in answers]}

    def _open(self) -> Session:
        if self._session is None or self._session.closed:
            self._session = load(self._bundle, self._load_options)
            if self._session.manifest.content_hash != self._content_hash:
                raise PassError(f"{self._bundle} is another bundle on this node, or has changed")
        return self._session


@main.command()
@opts.BUNDLE
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "--actors", default=1, show_default=True, help="Actors, each with --threads CPUs (or 1)."
)
@opts.generation_options
@click.option(
    "--seed", default=0, show_default=True, help="Line n is sampled with this seed + n - 1."
)
@opts.load_flags("max_batch_size")
@one_line_errors
def batch(bundle: Path, requests: Path, results: Path, actors: int, **options: Any) -> None:
    """Answer every line of the .jsonl file REQUESTS, in order, as pass-run batch does."""
    # This removes its own fields from `options`; those of LoadOptions remain.
    defaults, lines = opts.generate_options(options), read_lines(requests)
    load_options = load_options_of(options)
    if actors < 1:
        raise PassError(f"--actors must be at least 1, not {actors}")
    require("cpu", "ray")
    import ray.data

    # Opened here too, so that errors of the bundle do not only appear in an actor's log.
    with opts.open_bundle(bundle, load_options) as session:
        size, content_hash = BLOCK_LINES_PER_SLOT * session.slots, session.manifest.content_hash
    start_ray(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    rows = [{"number": line.number, "text": line.text} for line in lines]
    answered = ray.data.from_items(rows, override_num_blocks=max(1, len(rows) // size)).map_batches(
        Answerer,
        fn_constructor_args=(bundle.absolute(), content_hash, load_options, defaults),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=load_options.threads,
        num_gpus=gpus_of_replica(load_options.device),
    )
    with replacing(results) as file:
        file.writelines(row["result"].encode() + b"\n" for row in answered.iter_rows())


if __name__ == "__main__":
    main()
