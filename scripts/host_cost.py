"""What decoding costs outside the trunk: the tails, and the Python loop between the graphs, against a trunk pass.

    python scripts/host_cost.py build/smollm2-135m

The time of trunk and tail is taken around their one call per pass; everything else is the loop.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.backends.ort.backend import BoundTail
from pass_runtime.testing.lossless import run_tokens

SAMPLERS = {
    "greedy": SamplingParams(),
    "sample T=0.8": SamplingParams(0.8, seed=1),
    "top-k 50, top-p 0.9": SamplingParams(0.8, 50, 0.9, 1),
}


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


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=0, help="0 is the engine's default.")
def main(bundle: Path, tokens: int, rounds: int, threads: int) -> None:
    """Print milliseconds by pass, and what is not the trunk as a share of it; medians over rounds."""
    session = load(bundle, "cpu", threads=threads)
    inner: Any = session.backend
    trunk = inner._trunk.run = Timed(inner._trunk.run)
    tail = Timed(lambda bound: run_tail(bound))
    run_tail, BoundTail.run = BoundTail.run, lambda bound: tail(bound)  # type: ignore[method-assign]
    prompt = session.encode("The history of the Roman Empire begins with")
    print(f"{'sampler':20} {'plan':9} {'trunk ms':>9} {'tail ms':>8} {'loop ms':>8} {'loop':>6} {'both':>6}")
    for name, sampling in SAMPLERS.items():
        for plan in ("ar", "two-pass"):
            options = GenerateOptions(max_new_tokens=tokens, sampling=sampling, plan=plan, ignore_eos=True)
            times: list[tuple[float, float, float]] = []
            for _ in range(rounds + 1):
                trunk.seconds = tail.seconds = 0.0
                started = time.perf_counter()
                stats = run_tokens(session, prompt, options).stats
                whole = time.perf_counter() - started - stats.prefill_seconds
                # prefill's own trunk time is not decoding
                inside = trunk.seconds - min(trunk.seconds, stats.prefill_seconds)
                times.append((inside / stats.passes, tail.seconds / stats.passes, (whole - inside) / stats.passes))
            pass_, tails, host = (1e3 * statistics.median(column) for column in zip(*times[1:], strict=True))
            loop = host - tails
            print(f"{name:20} {plan:9} {pass_:9.2f} {tails:8.2f} {loop:8.2f} {loop / pass_:6.1%} {host / pass_:6.1%}")


if __name__ == "__main__":
    main()
