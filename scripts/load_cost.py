"""What opening a bundle on the CPU costs: seconds, and memory when several processes have it open.

    pip install -e '.[export,peers]'
    python scripts/load_cost.py build/smollm2-135m-int4 --genai build/genai/int4 --threads 2

For every bundle: opened without kept weights; for the first time, which writes them (into a directory of its own); for
the second time, which reads their hashes; and later. Times are the medians of --rounds, in processes of their own that
have imported everything: until it is open, and until it has written one token after a prompt of --prompt tokens. The
first and the second time happen once in a round. Memory is what --processes such processes hold together at the end, by
/proc/PID/smaps_rollup: a page that several of them map counts once (Pss), and what is theirs alone (anonymous).
onnxruntime-genai opens its own int4 file of the same model (compare_genai.py makes it).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from contestants import Write, open_genai

from pass_runtime import GenerateOptions, load
from pass_runtime.bundle import integrity
from pass_runtime.cli.command_errors import one_line_errors

SPAWN = multiprocessing.get_context("spawn")
Open = Callable[[Path, int], Write]
Figures = tuple[float, float, int, int]
"""Seconds until it is open and until the first token; bytes of Pss and of anonymous memory."""


def open_bundle(path: Path, threads: int, *, weight_cache: bool = True) -> Callable[[list[int], int], Any]:
    """Return decoding by a session, as `contestants.open_pass` does, which times passes for `auto`."""
    session = load(path, "cpu", threads=threads, weight_cache=weight_cache)
    return lambda ids, tokens: [*session.generate_ids(ids, GenerateOptions(max_new_tokens=tokens, plan="ar"))]


def memory() -> tuple[int, int]:
    """Bytes of Pss and of anonymous memory that this process holds."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    pss, anonymous = (int(re.search(rf"(?m)^{name}:\s*(\d+) kB", text)[1]) << 10 for name in ("Pss", "Anonymous"))  # type: ignore[index]
    return pss, anonymous


def work(opener: Open, path: Path, threads: int, prompt: int, pipe: Connection) -> None:
    """A process: opens when it is told to, and reports memory when all have opened."""
    integrity.SETTLED = 0  # the kept weights are written a moment before they are read again
    pipe.send("ready")
    pipe.recv()
    begun = perf_counter()
    write = opener(path, threads)
    opened = perf_counter()
    write([1 + i % 99 for i in range(prompt)], 1)
    pipe.send((opened - begun, perf_counter() - begun))
    pipe.recv()
    pipe.send(memory())
    pipe.recv()


def measure(opener: Open, path: Path, threads: int, prompt: int, processes: int = 1) -> list[Figures]:
    """The figures of so many processes that open one after another and stay open."""
    pipes, running = [], []
    for _ in range(processes):
        here, there = SPAWN.Pipe()
        running.append(SPAWN.Process(target=work, args=(opener, path, threads, prompt, there), daemon=True))
        running[-1].start()
        pipes.append(here)
    for pipe in pipes:
        pipe.recv()
    times, sizes = [[_ask(pipe) for pipe in pipes] for _ in range(2)]
    for pipe, process in zip(pipes, running, strict=True):
        pipe.send("end")
        process.join()
    return [(*time, *size) for time, size in zip(times, sizes, strict=True)]


def _ask(pipe: Connection) -> Any:
    pipe.send("go on")
    return pipe.recv()


def report(name: str, rounds: list[Figures], together: list[Figures] | None) -> None:
    """Print a row of a Markdown table."""
    opened, first = (statistics.median(column) for column in list(zip(*rounds, strict=True))[:2])
    one = [f"{size / 2**20:.0f}" for size in rounds[-1][2:]]
    all_ = [f"{sum(column) / 2**20:.0f}" for column in list(zip(*together, strict=True))[2:]] if together else ["", ""]
    click.echo(f"| {name} | {opened:.2f} | {first:.2f} | {' | '.join([*one, *all_])} |")


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--genai", type=click.Path(exists=True, path_type=Path), help="An int4 model of onnxruntime-genai.")
@click.option("--processes", type=click.IntRange(1), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--prompt", type=click.IntRange(1), default=16, show_default=True, help="Tokens of the prompt.")
@click.option("--threads", default=0, help="0 is each engine's default.")
@one_line_errors
def main(bundles: tuple[Path, ...], genai: Path | None, processes: int, rounds: int, prompt: int, threads: int) -> None:
    """Print seconds, and MiB of one process and of several."""
    alone: Mapping[str, int] = {"threads": threads, "prompt": prompt}
    click.echo(f"| | open, s | first token, s | Pss, MiB | anonymous | {processes} processes: Pss | anonymous |")
    click.echo("|---|---|---|---|---|---|---|")
    for bundle in bundles:
        with tempfile.TemporaryDirectory() as directory:
            _bundle(bundle, rounds, processes, Path(directory), alone)
    if genai is not None:
        opener: Open = open_genai
        found = [measure(opener, genai, **alone)[0] for _ in range(rounds)]
        report("onnxruntime-genai", found, measure(opener, genai, **alone, processes=processes))


def _bundle(bundle: Path, rounds: int, processes: int, directory: Path, alone: Mapping[str, int]) -> None:
    anew = partial(open_bundle, weight_cache=False)
    found: dict[str, list[Figures]] = {"without": [], "the first time": [], "the second time": [], "later": []}
    for number in range(rounds):
        os.environ["PASS_CACHE"] = str(directory / str(number))
        measure(anew, bundle, **alone)  # its hashes are remembered
        found["without"] += measure(anew, bundle, **alone)
        for when in ("the first time", "the second time", "later"):
            found[when] += measure(open_bundle, bundle, **alone)
    for when, figures in found.items():
        kind = {"without": anew, "later": open_bundle}.get(when)
        together = measure(kind, bundle, **alone, processes=processes) if kind else None
        report(f"{bundle.name}, {when}", figures, together)


if __name__ == "__main__":
    main()
