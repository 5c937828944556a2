"""Serves a bundle as `pass-run serve` does, from replicas on a Ray cluster, with autoscaling.

    pip install 'pass-toolkit[cpu,serve,ray]'
    python scripts/serve_ray.py build/smollm2-135m --replicas 2 --max-replicas 8

Every replica runs the whole app with its own session, slots, queue and metrics. The script joins
the cluster that RAY_ADDRESS names, or starts one. The bundle must be at the same path on every
node. If a replica dies, Ray replaces it; its requests fail with status 500, and clients should
retry them (the openai package does).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pass_runtime.backends.base import DEFAULT_BATCH
from pass_runtime.backends.open import gpus_of_replica
from pass_runtime.cli import flags as opts
from pass_runtime.commands.errors import one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.options import LoadOptions
from pass_server import flags as server_flags
from pass_server.serve_options import ServeOptions, check_exposure

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def deployment(
    bundle: Path,
    load_options: LoadOptions,
    slots: int,
    options: ServeOptions,
    scaling: dict[str, int],
) -> Any:
    """Return a Ray Serve deployment of the server. slots: of each replica. scaling: `min_replicas`
    and `max_replicas`."""
    from ray import serve

    def app() -> Any:
        """Make the app of one replica, in that replica's process."""
        from pass_runtime import load
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


@click.command()
@opts.BUNDLE
@server_flags.server_options
@click.option("--replicas", default=1, show_default=True, help="Fewest replicas.")
@click.option("--max-replicas", type=int, help="Most replicas.  [default: --replicas]")
@click.option(
    "--max-batch-size", default=DEFAULT_BATCH, show_default=True, help="Slots per replica."
)
@one_line_errors
def main(
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
    limits = server_flags.serve_options(options)  # leaves the fields of LoadOptions
    load_options = LoadOptions(**options)
    load_options = replace(load_options, threads=load_options.threads or 1)
    gpus_of_replica(load_options.device)  # refuses `cuda:1`: Ray chooses the GPU
    check_exposure(host, limits.keys, allow_no_key=allow_no_key)
    require("cpu", "ray", "serve")
    import ray
    from ray import serve

    # Opened here too, so that errors of the bundle do not only appear in a replica's log.
    opts.open_bundle(bundle, load_options).close()
    scaling = {"min_replicas": replicas, "max_replicas": max_replicas}
    server = deployment(bundle.absolute(), load_options, slots, limits, scaling)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
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


if __name__ == "__main__":
    main()
