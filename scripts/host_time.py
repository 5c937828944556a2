"""The host's own time in a pass: what decoding costs beside the engine, in microseconds.

    python scripts/host_time.py build/smollm2-135m

A pass of a session runs as always, but for its trunk and tail: instead of those, the host gets tokens at once, in which
each draft is accepted with the probability --acceptance. What is left is choosing the plan, staging windows, n-gram
drafts, text, statistics and events; launching the engine and waiting for it are not in it. The figures are medians of
--rounds of the time of a text of --tokens tokens by its passes; each kind of request decodes alone in a batch of its
own, and no reader waits for pieces. `pass-cpp host-time` prints the same for the C++ runtime.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
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
from pass_runtime.cli.errors import one_line_errors
from pass_runtime.cli.tables import show_rows

FIRST, WORDS = 100, 40
"""The first of the tokens that are written, and how many: n-grams of so few occur again."""
KINDS: dict[str, GenerateOptions] = {
    "ar": GenerateOptions(plan="ar"),
    "fused:4": GenerateOptions(plan="fused", lookahead=4),
    "two-pass": GenerateOptions(plan="two-pass", lookahead=4),
    "fused:4+ngram": GenerateOptions(plan="fused", lookahead=4, draft="both"),
    "fused:4, T=0.8": GenerateOptions(plan="fused", lookahead=4, sampling=SamplingParams(0.8, seed=1)),
    "auto": GenerateOptions(plan="auto", lookahead=4),
}
"""What is measured, where the bundle has that many drafts."""


class NoEngine:
    """Runs no graph: writes tokens for every slot, each draft of which is accepted with probability `acceptance`."""

    def __init__(self, backend: Backend, acceptance: float) -> None:
        self._backend, self._acceptance, self._random = backend, acceptance, random.Random(0)
        self.passes = 0

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
                found["emitted"][slot, place] = FIRST + self._random.randrange(WORDS)
        return found


def microseconds(session: Session, engine: NoEngine, options: GenerateOptions, batch: int) -> float:
    """Of a pass over `batch` sequences that begin together."""
    engine.passes = 0
    started = perf_counter()
    streams = session._worker.call(lambda: [session.generate([FIRST], options) for _ in range(batch)])
    for stream in streams:
        stream.result()
    return (perf_counter() - started) / engine.passes * 1e6


@click.command(help=(__doc__ or "").split("\n\n")[0], context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--tokens", type=click.IntRange(16), default=256, show_default=True, help="Tokens of each text.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.5, show_default=True)
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON, too.")
@one_line_errors
def main(
    bundle: Path, batches: tuple[int, ...], tokens: int, rounds: int, acceptance: float, output: Path | None
) -> None:
    figures: dict[str, dict[int, float]] = {}
    for batch in batches:
        with load(bundle, "cpu", threads=1, max_batch_size=batch) as session:
            session.warm_up()
            engine = NoEngine(session.backend, acceptance)
            session.backend._run_pass = engine.run_pass  # type: ignore[method-assign]
            for name, kind in KINDS.items():
                options = replace(kind, max_new_tokens=tokens, ignore_eos=True)
                measured = [microseconds(session, engine, options, batch) for _ in range(rounds)]
                figures.setdefault(name, {})[batch] = round(statistics.median(measured), 1)
    show_rows(
        f"microseconds of a pass outside the engine: {bundle.name}",
        [
            {"requests": name} | {f"batch {batch}": f"{each:.1f}" for batch, each in by_batch.items()}
            for name, by_batch in figures.items()
        ],
        left=("requests",),
    )
    if output is not None:
        write_json(output, {"bundle": bundle.name, "tokens": tokens, "acceptance": acceptance, "host_us": figures})


if __name__ == "__main__":
    main()
