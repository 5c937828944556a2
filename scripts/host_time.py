"""The host's own time in a pass: what decoding costs beside the engine, in microseconds.

    python scripts/host_time.py build/smollm2-135m

A pass of a session runs as always, but for its trunk and tail: instead of those, the host gets tokens at once, in which
each draft is accepted with the probability --acceptance. What is left is choosing the plan, staging windows, n-gram
drafts, text, statistics and events; launching the engine and waiting for it are not in it. The figures are medians over
the steps of --rounds texts of --tokens tokens, so they leave out the few in which a growing cache is copied. Each kind
of request decodes in a batch of its own. The program `host_time` of the C++ runtime's tests prints the same for that.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.backends.base import Backend, PassKind
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.cli.tables import show_rows

TEXT = "She opened the letter, read it twice, and looked at the sea. The sea was calm, and the letter was not for her."
"""What is written are tokens of this text, at random: n-grams of so few occur again."""
KINDS: dict[str, GenerateOptions] = {
    "ar": GenerateOptions(plan="ar"),
    "two-pass": GenerateOptions(plan="two-pass"),
    "fused": GenerateOptions(plan="fused"),
    "fused, T=0.8": GenerateOptions(plan="fused", sampling=SamplingParams(0.8, seed=1)),
    "fused and n-grams": GenerateOptions(plan="fused", draft="both"),
    "auto": GenerateOptions(plan="auto"),
}
"""Requests by what the table calls them."""


class NoEngine:
    """Runs no graph: writes tokens for every slot, each draft of which is accepted with probability `acceptance`."""

    def __init__(self, backend: Backend, tokens: Sequence[int], acceptance: float) -> None:
        self._backend, self._acceptance, self._random = backend, acceptance, random.Random(0)
        self._tokens, self.passes = tokens, 0

    def run_pass(self, kind: PassKind) -> Mapping[str, npt.NDArray[Any]]:
        """In place of `Backend._run_pass`."""
        self.passes += 1
        found = {name: np.zeros(shape, np.int64) for name, shape in self._backend.results_of(kind).items()}
        depth = kind.plan.max_emitted - 1
        for slot in range(kind.batch):
            count = 1
            while count <= depth and self._random.random() < self._acceptance:
                count += 1
            found["count"][slot] = count
            for place in range(count):
                found["emitted"][slot, place] = self._random.choice(self._tokens)
        return found


def microseconds(session: Session, engine: NoEngine, options: GenerateOptions, batch: int, rounds: int) -> float:
    """Of a step with a pass over `batch` sequences that begin together."""
    scheduler, taken = session._worker._scheduler, list[float]()
    step = scheduler.step

    def timed() -> None:
        before, started = engine.passes, perf_counter()
        step()
        if engine.passes > before:
            taken.append(perf_counter() - started)

    scheduler.step = timed  # type: ignore[method-assign]
    first = session.encode(TEXT)[:1]
    for _ in range(rounds):
        streams = session._worker.call(lambda: [session.generate(first, options) for _ in range(batch)])
        for stream in streams:
            stream.result()
    scheduler.step = step  # type: ignore[method-assign]
    return statistics.median(taken) * 1e6


@click.command(help=(__doc__ or "").split("\n\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="cpu", show_default=True, help="Whose buffers windows are staged in.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=256, show_default=True, help="Tokens of each text.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.5, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON, too.")
@one_line_errors
def main(
    bundle: Path,
    device: str,
    batches: tuple[int, ...],
    tokens: int,
    rounds: int,
    acceptance: float,
    output: Path | None,
) -> None:
    figures: dict[str, dict[int, float]] = {}
    for batch in batches:
        with load(bundle, device, threads=1, max_batch_size=batch) as session:
            session.warm_up()
            engine = NoEngine(session.backend, session.encode(TEXT)[1:], acceptance)
            session.backend._run_pass = engine.run_pass  # type: ignore[method-assign]
            for name, kind in KINDS.items():
                options = replace(kind, max_new_tokens=tokens, ignore_eos=True)
                figures.setdefault(name, {})[batch] = round(microseconds(session, engine, options, batch, rounds), 1)
    show_rows(
        f"microseconds of a pass outside the engine: {bundle.name}",
        [
            {"requests": name} | {f"batch {batch}": f"{each:.1f}" for batch, each in by_batch.items()}
            for name, by_batch in figures.items()
        ],
        left=("requests",),
    )
    write_json({"bundle": bundle.name, "device": device, "tokens": tokens, "host_us": figures}, output)


if __name__ == "__main__":
    main()
