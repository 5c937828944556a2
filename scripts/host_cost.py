"""What decoding costs outside the trunk: the tails, and the Python loop between the graphs, against a trunk pass.

    python scripts/host_cost.py build/smollm2-135m

A round of the scheduler is one pass over every sequence. It is timed as a whole, with text and stop strings; so are the
backend's pass in it and that pass's tail. What the pass does not take is the loop; what its tail does not take is the
trunk, and the copy of what was emitted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pass_runtime import GenerateOptions, SamplingParams, Session, load
from pass_runtime.cli.errors import one_line_errors
from pass_runtime.decode.runner import Runner
from pass_runtime.decode.scheduler import Scheduler
from pass_runtime.decode.sequence import End, Sequence
from pass_runtime.errors import PassError
from pass_runtime.text.stream import TextStream
from pass_runtime.tuning.tuners import Tuners

SAMPLERS = {
    "greedy": SamplingParams(),
    "sample T=0.8": SamplingParams(0.8, seed=1),
    "top-k 50, top-p 0.9": SamplingParams(0.8, 50, 0.9, 1),
}
PROMPT = "The history of the Roman Empire begins with"
WARM_UP = 4
"""Rounds before the clock starts; even, so that every plan of a cycle was run as often as the others."""


class Timed:
    """Adds up the seconds inside a call."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call, self.seconds = call, 0.0

    def __call__(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds += time.perf_counter() - started


class Bench:
    """A scheduler over a session's backend, without a thread of its own."""

    def __init__(self, session: Session) -> None:
        self._session, backend = session, session.backend
        self._tail = backend.run_tail = Timed(backend.run_tail)  # type: ignore[method-assign]
        self._pass = backend.run = Timed(backend.run)  # type: ignore[method-assign]
        runner = Runner(backend)
        tuners = Tuners(session.manifest, backend.capabilities, runner.idle_pass, lambda: runner.room)
        self._scheduler = Scheduler(runner, tuners, backend.capabilities.slots)
        self._round = Timed(self._scheduler.round)

    def measure(self, options: GenerateOptions, passes: int) -> tuple[float, float, float]:
        """Seconds of trunk, tail and loop in one round with every slot in use."""
        slots = self._session.backend.capabilities.slots
        sequences = [self._sequence(options) for _ in range(slots)]
        for sequence in sequences:
            self._scheduler.add(sequence)
        while not all(sequence.prefilled for sequence in sequences):
            self._scheduler.round()
        for number in range(WARM_UP + passes):
            if number == WARM_UP:
                self._round.seconds = self._pass.seconds = self._tail.seconds = 0.0
            self._round()
        if any(sequence.finished for sequence in sequences):
            raise PassError(f"the texts ended before {passes} passes; use fewer --passes")
        self._scheduler.end_all(End("cancelled"))
        whole, inside, tail = (timed.seconds / passes for timed in (self._round, self._pass, self._tail))
        return inside - tail, tail, whole - inside

    def _sequence(self, options: GenerateOptions) -> Sequence:
        prompt = self._session.encode(PROMPT)
        reader = TextStream(self._session.tokenizer, prompt, ("\n\n\n\n\n\n",))
        return Sequence(self._session.request(prompt, options), reader)


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--batch", "batches", multiple=True, type=click.IntRange(1), default=(1, 8), show_default=True)
@click.option("--passes", type=click.IntRange(1), default=64, show_default=True, help="In every round.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", default=0, help="0 is the engine's default.")
@one_line_errors
def main(bundle: Path, batches: tuple[int, ...], passes: int, rounds: int, threads: int) -> None:
    """Print milliseconds by pass, and what is not the trunk as a share of it; medians over rounds."""
    heads = ("trunk ms", "tail ms", "loop ms", "loop", "both")
    print(f"{'sampler':20} {'plan':9} {'batch':>5} " + " ".join(f"{head:>8}" for head in heads))
    for batch in batches:
        with load(bundle, "cpu", threads=threads, max_batch_size=batch) as session:
            bench = Bench(session)
            for name, sampling in SAMPLERS.items():
                for plan in ("ar", "two-pass"):
                    options = GenerateOptions(
                        session.backend.capabilities.max_capacity, sampling, plan=plan, ignore_eos=True
                    )
                    times = [bench.measure(options, passes) for _ in range(rounds)]
                    trunk, tail, loop = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
                    shares = f"{loop / trunk:8.1%} {(tail + loop) / trunk:8.1%}"
                    print(f"{name:20} {plan:9} {batch:5} {trunk:8.2f} {tail:8.2f} {loop:8.2f} {shares}", flush=True)


if __name__ == "__main__":
    main()
