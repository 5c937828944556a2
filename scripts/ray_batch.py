"""Runs `pass-run batch` on a Ray cluster.

    pip install 'pass-toolkit[cpu,ray]'
    python scripts/ray_batch.py build/smollm2-135m in.jsonl out.jsonl --actors 8

ray.data hands out blocks of lines to actors, hands out a block again if its actor dies, and holds
back blocks for which no actor has room. Requests, seeds and results are those of `pass-run batch`,
but results have no fingerprint of their requests, so a run that was stopped begins again. The
script joins the cluster of RAY_ADDRESS, or starts one. The bundle must be at the same path on every
node.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pass_runtime import Session, load
from pass_runtime.backends.open import gpus_of_replica
from pass_runtime.cli import flags as opts
from pass_runtime.cli.batch_session import results_of
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.commands.errors import one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import Line, replacing, to_json
from pass_runtime.options import GenerateOptions, LoadOptions

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
BLOCK_LINES_PER_SLOT = 8
"""A block has this many lines for each slot of an actor."""


class Answerer:
    """A Ray actor with a session of its own."""

    def __init__(
        self, bundle: Path, content_hash: str, load_options: LoadOptions, defaults: GenerateOptions
    ) -> None:
        """content_hash: of the bundle (`Manifest.content_hash`)."""
        self._bundle, self._content_hash = bundle, content_hash
        self._load_options, self._defaults = load_options, defaults
        self._session: Session | None = None

    def __call__(self, block: dict[str, Sequence[Any]]) -> dict[str, list[str]]:
        """Map the columns of a block, `number` and `text` of its lines, to `result`, JSON."""
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


@click.command()
@opts.BUNDLE
@click.argument("requests", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "--actors",
    default=1,
    show_default=True,
    help="Number of actors, each with --threads CPUs (or 1).",
)
@opts.generation_options
@click.option(
    "--seed", default=0, show_default=True, help="Line n is sampled with this seed + n - 1."
)
@opts.load_flags("max_batch_size")
@one_line_errors
def main(bundle: Path, requests: Path, results: Path, actors: int, **options: Any) -> None:
    """Answer every line of the .jsonl file REQUESTS with the actors of a Ray cluster, in order."""
    # This removes its own fields from `options`; those of LoadOptions remain.
    defaults, lines = opts.generate_options(options), read_lines(requests)
    load_options = LoadOptions(**options)
    load_options = replace(load_options, threads=load_options.threads or 1)
    gpus = gpus_of_replica(load_options.device)
    if actors < 1:
        raise PassError(f"--actors must be at least 1, not {actors}")
    require("cpu", "ray")
    import ray.data

    # Opened here too, so that errors of the bundle do not only appear in an actor's log.
    with opts.open_bundle(bundle, load_options) as session:
        size, content_hash = BLOCK_LINES_PER_SLOT * session.slots, session.manifest.content_hash
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    rows = [{"number": line.number, "text": line.text} for line in lines]
    answered = ray.data.from_items(rows, override_num_blocks=max(1, len(rows) // size)).map_batches(
        Answerer,
        fn_constructor_args=(bundle.absolute(), content_hash, load_options, defaults),
        batch_size=size,
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=load_options.threads,
        num_gpus=gpus,
    )
    with replacing(results) as file:
        file.writelines(row["result"].encode() + b"\n" for row in answered.iter_rows())


if __name__ == "__main__":
    main()
