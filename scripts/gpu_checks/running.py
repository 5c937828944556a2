"""Runs steps one after another, each for a limited time, within the time for all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_checks.steps import OUTPUT, ROOT, Step

SECONDS = {"device": (5, 30), "tiny": (20, 120), "layers": (20, 120), "attention": (30, 120)}
SECONDS |= {"export": (40, 180), "build": (30, 180)}
SECONDS |= {"rows": (15, 60), "batch": (15, 60), "bench": (20, 100), "cpp": (20, 100), "tests": (20, 150)}
SECONDS |= {"step-time": (60, 600), "peers": (45, 120)}
"""By the first word of a step's name, for ten minutes in all: the seconds that it needs to start, and its limit. With
more minutes a step has more time."""
USUAL = 600.0


@dataclass(frozen=True)
class Result:
    """The result of a step. status: ok, failed or skipped. data: the JSON that it wrote, even if it failed later."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    data: Any = None


def run_steps(steps: Sequence[Step], budget: float, log: Path, done: Callable[[list[Result]], None]) -> list[Result]:
    """Run the steps one after another; `done` gets all results so far after every step. budget: seconds for all."""
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            left = budget - (time.monotonic() - started)
            reason = why_skip(step, results, left)
            longer = max(1.0, budget / USUAL)
            if reason:
                results.append(Result(step.name, "skipped", 0, reason))
            else:
                results.append(run_step(step, left, log, scratch, longer))
            done(results)
    return results


def why_skip(step: Step, results: Iterable[Result], left: float) -> str | None:
    """Return the reason to skip a step, or None. left: seconds of the budget."""
    if step.blocked:
        return step.blocked
    for result in results:
        if result.name in step.after and result.status != "ok":
            return f"{result.name} {'failed' if result.status == 'failed' else 'was skipped'}"
    least = SECONDS[step.name.split()[0]][0]
    return None if left >= least else f"it needs {least} s, and {max(left, 0):.0f} s of the budget are left"


def run_step(step: Step, left: float, log: Path, scratch: str, longer: float = 1.0) -> Result:
    """Run a step in a process group of its own, which is ended after its time, or on Ctrl-C. longer: how many times as
    long as usual it may take."""
    output, kind = Path(scratch, f"{step.name}.json"), step.name.split()[0]
    limit, started = min(longer * SECONDS[kind][1], left), time.monotonic()
    command = [str(output) if word == OUTPUT else word for word in step.command]
    with log.open("a+b") as file:
        file.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
        file.flush()
        begin = file.tell()
        process: subprocess.Popen[bytes] | None = None
        try:
            with _interrupt_afterwards():  # a process that was begun is known, and so ended
                process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
            status, reason = "failed" if process.wait(limit) else "ok", ""
        except subprocess.TimeoutExpired:
            status, why = ("failed", "its limit") if limit < left else ("skipped", "the end of the budget")
            reason = f"stopped after {limit:.0f} s, {why}"
        finally:
            if process is not None:
                _end(process)
        file.seek(begin)
        said = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    if kind == "build" and status == "failed" and "has engines" in "".join(said[-1:]):
        status = "ok"  # an earlier run built them
    elif kind == "tests" and status == "ok":  # pytest ends with status 0 even if it skips everything
        status, reason = "ok" if " passed" in said[-1] else "skipped", said[-1].strip("= ")
    elif status == "failed":
        reason = reason or " / ".join(said[-3:]) or f"status {process.returncode}"
    data = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else None
    return Result(step.name, status, time.monotonic() - started, reason, data)


@contextlib.contextmanager
def _interrupt_afterwards() -> Iterator[None]:
    """A Ctrl-C within the context is raised at its end."""
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of the step, including children of children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)
