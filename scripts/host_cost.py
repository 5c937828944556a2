"""What decoding costs outside the trunk: the Python loop, the tails and the binding, as a share of a trunk pass.

    python scripts/host_cost.py build/smollm2-135m

The trunk's time is taken around its one call per pass; everything else of the loop is host cost.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click

from pass_runtime import GenerateOptions, SamplingParams, load
from pass_runtime.lossless import run_tokens

SAMPLERS = {
    "greedy": SamplingParams(),
    "sample T=0.8": SamplingParams(0.8, seed=1),
    "top-k 50, top-p 0.9": SamplingParams(0.8, 50, 0.9, 1),
}


class TimedTrunk:
    """Adds up the seconds inside the trunk."""

    def __init__(self, trunk: Any) -> None:
        self._trunk, self.seconds = trunk, 0.0
        self.grow = trunk.grow

    def run(self, *arguments: Any) -> None:
        started = time.perf_counter()
        self._trunk.run(*arguments)
        self.seconds += time.perf_counter() - started


@click.command()
@click.argument("bundle", type=click.Path(exists=True, path_type=Path))
@click.option("--tokens", default=64, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=0, help="0 is the engine's default.")
def main(bundle: Path, tokens: int, rounds: int, threads: int) -> None:
    """Print host milliseconds and the share of a trunk pass, medians over rounds."""
    session = load(bundle, "cpu", threads=threads)
    trunk = session.backend._trunk = TimedTrunk(session.backend._trunk)  # type: ignore[attr-defined]
    prompt = session.encode("The history of the Roman Empire begins with")
    print(f"{'sampler':20} {'plan':9} {'trunk ms':>9} {'host ms':>8} {'share':>6}")
    for name, sampling in SAMPLERS.items():
        for plan in ("ar", "two-pass"):
            options = GenerateOptions(max_new_tokens=tokens, sampling=sampling, plan=plan, ignore_eos=True)
            shares, trunks, hosts = [], [], []
            for _ in range(rounds + 1):
                trunk.seconds = 0.0
                started = time.perf_counter()
                stats = run_tokens(session, prompt, options).stats
                whole = time.perf_counter() - started - stats.prefill_seconds
                # prefill's own trunk time is not decoding
                inside = trunk.seconds - min(trunk.seconds, stats.prefill_seconds)
                trunks.append(1e3 * inside / stats.passes)
                hosts.append(1e3 * (whole - inside) / stats.passes)
                shares.append((whole - inside) / inside)
            median = [statistics.median(values[1:]) for values in (trunks, hosts, shares)]
            print(f"{name:20} {plan:9} {median[0]:9.2f} {median[1]:8.2f} {median[2]:6.1%}")


if __name__ == "__main__":
    main()
