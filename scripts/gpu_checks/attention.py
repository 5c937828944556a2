"""Which attention is faster in ONNX Runtime on CUDA: that of trunk.onnx, or GroupQueryAttention, which an export adds
with `--cuda-attention group-query`. Both run the same layers over the same cache, and their logits must agree: where
they do not, or the second does not run, the advice is to leave the option out, and nothing else is wrong."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from step_time import TRUNK, Shape, measure, open_backend, shape_options, write_trunk

from pass_exporter.derived.cuda import write_trunk_for_cuda
from pass_runtime.backends.base import Backend
from pass_runtime.bundle.manifest import DerivedTrunk
from pass_runtime.bundle.plan import prefill_plan
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError

LIMIT = 3e-2
"""The largest difference of logits, as a share of the largest logit: fp16."""
FASTER = 0.98
"""From here on a difference is more than the noise of a measurement."""
FLAG = "--cuda-attention group-query"


def run(backend: Backend, rows: tuple[int, ...], capacity: int, rounds: int) -> tuple[list[float], npt.NDArray[Any]]:
    """The seconds of a pass for each of `rows`, and the logits of the widest."""
    seconds = measure(backend, rows, capacity, rounds)
    return seconds, backend.logits(prefill_plan(rows[-1]))


def compare(
    directory: Path, shape: Shape, device: str, rows: tuple[int, ...], capacities: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """The report: a cell for every number of rows and capacity, and which flag to use."""
    (derived,) = write_trunk_for_cuda(directory / TRUNK, capacities[-1])
    forms: dict[str, tuple[DerivedTrunk, ...]] = {
        "attention": (),
        "group_query": (derived.model_copy(update={"device": device}),),
    }
    cells: dict[tuple[int, int], dict[str, Any]] = {}
    uncaptured: dict[str, str] = {}
    logits: dict[tuple[str, int], npt.NDArray[Any]] = {}

    def time_form(form: str) -> None:
        with contextlib.closing(open_backend(directory, shape, device, rows, capacities, forms[form])) as backend:
            for capacity in capacities:
                seconds, logits[form, capacity] = run(backend, rows, capacity, rounds)
                for width, second in zip(rows, seconds, strict=True):
                    cell = cells.setdefault((width, capacity), {"rows": width, "capacity": capacity})
                    cell[f"{form}_milliseconds"] = 1e3 * second
            uncaptured.update(backend.uncaptured)

    time_form("attention")
    try:
        time_form("group_query")
        _compare_logits(*([logits[form, capacity] for capacity in capacities] for form in forms))
    except PassError as error:
        use = f"leave out {FLAG}: {error}"
    else:
        for cell in cells.values():
            cell["ratio"] = cell["group_query_milliseconds"] / cell["attention_milliseconds"]
        faster = float(np.mean([cell["ratio"] for cell in cells.values()])) < FASTER
        use = f"export with {FLAG}" if faster else f"leave out {FLAG}"
    return {"shape": asdict(shape), "cells": [*cells.values()], "use": use, "uncaptured": uncaptured}


def _compare_logits(expected: list[npt.NDArray[Any]], found: list[npt.NDArray[Any]]) -> None:
    for one, other in zip(expected, found, strict=True):
        difference = float(np.abs(one - other).max() / np.abs(one).max())
        if not difference <= LIMIT:
            raise PassError(f"it computes other logits, by {difference:.2g} of the largest")


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 5, 9, 25), show_default=True)
@click.option("--capacity", "capacities", multiple=True, type=int, default=(512, 2048, 8192), show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the trunk here, for the next run.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the results here, as JSON.")
@shape_options
@one_line_errors
def main(device: str, rounds: int, keep: Path | None, output: Path | None, **options: Any) -> None:
    """Time both on DEVICE and say which flag to use."""
    rows, capacities = (tuple(sorted({*options.pop(name)})) for name in ("rows", "capacities"))
    shape = Shape(**options)
    with tempfile.TemporaryDirectory() as scratch:
        report = compare(write_trunk(keep or Path(scratch), shape), shape, device, rows, capacities, rounds)
    write_json(report, output)
    for cell in report["cells"]:
        click.echo(" ".join(f"{name} {value:.4g}" for name, value in cell.items()))
    click.echo(report["use"])


if __name__ == "__main__":
    main()
