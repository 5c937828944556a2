"""Checks within minutes if this toolkit works on a machine with a GPU. Run scripts/gpu_check.sh.

Each step is a process. The most informative steps run first, and a step that cannot run is skipped
with a reason. The output directory has report.json and report.md, written after every step, and
gpu_check.log with what the steps print. The last line of the output is the verdict: works (exit
status 0), wrong (1), nothing ran (3), works but not captured (4: passes ran without CUDA graphs).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from gpu_report import (
    VERDICTS,
    Machine,
    Result,
    inspect_machine,
    read_figures,
    verdict,
    write_report,
)
from rich.console import Console
from rich.text import Text

from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.plan import MODES, make_cycle
from pass_runtime.bundle.read import read_manifest
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.errors import PassError

ROOT = Path(__file__).resolve().parents[1]
MODEL, BUNDLE, LOOKAHEAD = "smollm2-135m", ROOT / "build/smollm2-135m-fp16", 4
TESTS = ("tests/parity/test_cuda.py", "tests/runtime/test_trt_backend.py")
PLAN_FLAGS = (
    "--plan ar --plan two-pass --plan fused --plan auto "
    "--draft lookahead --draft ngram --draft both"
)
DEVICES = ("cuda", *LIBRARIES)
MEASURED_ON_CUDA = ("layers", "rows", "kernels", "batch", "bench", "genai", "attention")
MEASURED = ("device", "export", *(f"{kind} cuda" for kind in MEASURED_ON_CUDA))
"""Beginnings of the names of the steps that --measure runs."""
PROGRAM = ROOT / "build/cpp/release/pass-cpp"
PROMPT = "504,3575,282,4649,314,253,2591,216"
"""The prompt for the C++ runtime, which reads no text: token ids of SmolLM2."""
OUTPUT_PLACEHOLDER = "{output}"
"""Stands in a command for the file into which the step writes its JSON."""
MAX_SEQ_LEN, LAYER_GIB = 2048, 0.65
"""The longest sequence of engines, in tokens; the memory of a layer of the random 7B model."""
STEP_SECONDS = {
    "device": (5, 30),
    "tiny": (20, 120),
    "layers": (40, 240),
    "export": (40, 180),
    "build": (30, 180),
    "rows": (15, 60),
    "kernels": (15, 60),
    "batch": (20, 180),
    "bench": (20, 150),
    "cpp": (20, 100),
    "genai": (40, 120),
    "tests": (20, 150),
    "attention": (40, 240),
}
"""By the first word of a step's name: the seconds that must be left to start it, and its time limit
in seconds. If the budget of --minutes is larger than DEFAULT_BUDGET_SECONDS, the limits grow in
proportion."""
DEFAULT_BUDGET_SECONDS = 600.0
PYTHON_MODULE = (sys.executable, "-m")


@dataclass(frozen=True)
class Step:
    """A command to run.

    blocked: the reason why it cannot run; None if it can. after: names of steps that must succeed
    first.
    """

    name: str
    command: Sequence[str] = ()
    blocked: str | None = None
    after: Sequence[str] = ()


def plan_steps(machine: Machine, bundle: Path, tokens: int, layers: int) -> list[Step]:
    """Return all steps in order. Those that cannot run have `blocked` set.

    They check the device, compare backends with the CPU, time a large model's layers, build
    engines, measure the bundle, run tests, and time another attention operator.
    tokens: the length of each benchmark's answers. layers: of the random 7B model.
    """
    missing, no_device = machine.missing, machine.missing.get("cuda-python")
    steps = [Step("device", _gpu_step("device"), no_device)]
    for name in DEVICES:
        steps.append(Step(f"tiny {name}", _gpu_step("tiny", "--device", name), missing.get(name)))
    needed, memory, too_small = LAYER_GIB * layers, machine.memory, None
    if memory < needed:
        too_small = f"{layers} layers need {needed:.0f} GiB, this GPU has {memory:.1f}"
    flag = f"--layers={layers}"
    for name in DEVICES:
        blocked = missing.get(name) or no_device or too_small
        steps.append(Step(f"layers {name}", _gpu_step("layers", "--device", name, flag), blocked))
    steps += _bundle_steps(machine, bundle, tokens)
    # The project's addopts need plugins that may be missing.
    pytest = (*PYTHON_MODULE, "pytest", "-q", "-m", "gpu", "-o", "addopts=-ra", *TESTS)
    no_pytest = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    steps.append(Step("tests", pytest, no_pytest))
    command = _gpu_step("layers", "--device=cuda", "--cuda-attention=group-query", flag)
    blocked = missing.get("cuda") or no_device or too_small
    steps.append(Step("attention cuda", command, blocked, ("layers cuda",)))
    return steps if machine.gpu else [replace(step, blocked="no NVIDIA GPU") for step in steps]


def _gpu_step(*words: str) -> tuple[str, ...]:
    return sys.executable, str(ROOT / "scripts/gpu_steps.py"), *words, "-o", OUTPUT_PLACEHOLDER


def _bundle_steps(machine: Machine, bundle: Path, tokens: int) -> list[Step]:
    """Return the steps that build engines for the bundle, and measure it on every device.

    The first of them exports the bundle if it does not exist.
    """
    missing = machine.missing
    exporter = (*PYTHON_MODULE, "pass_exporter.cli")
    steps, exported, lookahead, max_seq_len = list[Step](), (), LOOKAHEAD, MAX_SEQ_LEN
    if (bundle / FILE_NAME).is_file():
        manifest = read_manifest(bundle)
        lookahead = manifest.lookahead.length
        max_seq_len = min(MAX_SEQ_LEN, manifest.model.max_capacity)
    else:
        flags = f"--model {MODEL} --lookahead {LOOKAHEAD} --dtype fp16 --cuda-attention group-query"
        steps.append(Step("export", (*exporter, *flags.split(), "-o", str(bundle))))
        exported = ("export",)
    for name in LIBRARIES:
        flags = f"--engine {name} --max-seq-len {max_seq_len}"
        command = (*exporter, "build", str(bundle), *flags.split())
        steps.append(Step(f"build {name}", command, missing.get(name), exported))
    after = {name: (f"build {name}",) if name in LIBRARIES else exported for name in DEVICES}

    def bench(flags: str) -> tuple[str, ...]:
        command = (*PYTHON_MODULE, "pass_runtime.cli.main", "bench", str(bundle))
        return (*command, *flags.split(), "-o", OUTPUT_PLACEHOLDER)

    # Engines run windows of these widths only.
    widths = sorted({plan.width for mode in MODES for plan in make_cycle(mode, lookahead).plans})
    for name in DEVICES:
        command = bench(f"--device {name} --rows {','.join(map(str, widths))}")
        steps.append(Step(f"rows {name}", command, missing.get(name), after[name]))
    blocked = missing.get("cuda") or missing.get("profiler")
    steps.append(Step("kernels cuda", _gpu_step("kernels", str(bundle)), blocked, exported))
    batches = "--plan ar --plan fused --batch 1,8,32 --device cuda"
    command = bench(f"{batches} --max-new-tokens {tokens}")
    steps.append(Step("batch cuda", command, missing.get("cuda"), exported))
    no_program = None if PROGRAM.exists() else "no C++ runtime; run scripts/build_cpp.sh"
    for name in DEVICES:
        flags = f"{PLAN_FLAGS} --device {name} --max-new-tokens {tokens}"
        for kind, sampling in {"greedy": "", "sampled": " --temperature 0.8 --seed 1"}.items():
            command = bench(flags + sampling)
            steps.append(Step(f"bench {name} {kind}", command, missing.get(name), after[name]))
        words = (*flags.split(), "-o", OUTPUT_PLACEHOLDER, "--prompt-ids", PROMPT)
        command = (str(PROGRAM), "bench", str(bundle), *words)
        steps.append(Step(f"cpp {name}", command, missing.get(name) or no_program, after[name]))
    command = _gpu_step("genai", str(bundle), f"--tokens={tokens}")
    steps.append(Step("genai cuda", command, missing.get("genai"), exported))
    return steps


def run_steps(
    steps: Sequence[Step], budget: float, log: Path, report: Callable[[list[Result]], None]
) -> list[Result]:
    """Run the steps one after another, and return their results.

    budget: seconds for all steps. report: is called with all results so far after each step.
    """
    started, results = time.monotonic(), list[Result]()
    limit_factor = max(1.0, budget / DEFAULT_BUDGET_SECONDS)
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            left = budget - (time.monotonic() - started)
            reason = why_skip(step, results, left)
            skipped = Result(step.name, "skipped", 0, reason) if reason else None
            results.append(skipped or run_step(step, left, log, scratch, limit_factor))
            report(results)
    return results


def why_skip(step: Step, results: Iterable[Result], left: float) -> str | None:
    """Return the reason to skip a step, or None. left: the remaining seconds of the budget."""
    if step.blocked:
        return step.blocked
    for result in results:
        if result.name in step.after and result.status != "ok":
            return f"{result.name} {'failed' if result.status == 'failed' else 'was skipped'}"
    least, _ = STEP_SECONDS[step.name.split()[0]]
    if left < least:
        return f"it needs {least} s, and {max(left, 0):.0f} s of the budget are left"
    return None


def run_step(step: Step, left: float, log: Path, scratch: str, limit_factor: float = 1.0) -> Result:
    """Run a step in a new process group, which is ended at the step's time limit or on Ctrl-C.

    left: the remaining seconds of the budget. log: what the step prints is appended to this file.
    scratch: a directory for its JSON. limit_factor: multiplies the time limit.
    """
    output, kind = Path(scratch, f"{step.name}.json"), step.name.split()[0]
    limit, started = min(limit_factor * STEP_SECONDS[kind][1], left), time.monotonic()
    command = [str(output) if word == OUTPUT_PLACEHOLDER else word for word in step.command]
    with log.open("a+b") as file:
        file.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
        file.flush()
        begin = file.tell()
        process, interrupts = None, list[int]()
        try:
            # Ctrl-C is delayed until `process` is set, so that the process is ended.
            handler = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )
            signal.signal(signal.SIGINT, handler)
            if interrupts:
                raise KeyboardInterrupt
            status, reason = "failed" if process.wait(limit) else "ok", ""
        except subprocess.TimeoutExpired:
            status, why = "skipped", "the end of the budget"
            if limit < left:
                status, why = "failed", "its limit"
            reason = f"stopped after {limit:.0f} s, {why}"
        finally:
            if process is not None:
                _end(process)
        file.seek(begin)
        printed = file.read().decode(errors="replace").splitlines()
    lines = [line.strip() for line in printed if line.strip()]
    if kind == "build" and status == "failed" and "has engines" in "".join(lines[-1:]):
        status = "ok"  # An earlier run built them.
    elif kind == "tests" and status == "ok":
        # The exit status of pytest is 0 even if it skips everything.
        status, reason = "ok" if " passed" in lines[-1] else "skipped", lines[-1].strip("= ")
    elif status == "failed":
        reason = reason or " / ".join(lines[-3:]) or f"status {process.returncode}"
    data = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else None
    return Result(step.name, status, time.monotonic() - started, reason, data)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of a step, including its descendants."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)


PATH = click.Path(path_type=Path)


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=PATH, default=BUNDLE)
@click.option(
    "-o",
    "--output",
    type=PATH,
    default=ROOT / "build/gpu",
    show_default="build/gpu",
    help="Results directory.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, min_open=True),
    default=10,
    help="Time for all steps.",
)
@click.option(
    "--tokens", type=click.IntRange(1), default=64, help="Length of each benchmark's answers."
)
@click.option(
    "--layers",
    type=click.IntRange(1),
    default=4,
    help="Layers of a random 7B model (32 are all); more layers need more --minutes.",
)
@click.option(
    "--only",
    multiple=True,
    help="Run only steps whose names begin with this (default: all steps); repeatable.",
)
@click.option(
    "--measure", is_flag=True, help="Run only the steps that measure ONNX Runtime on this GPU."
)
@click.option(
    "--before", type=PATH, help="report.json of an earlier run; its figures are shown too."
)
@one_line_errors
def main(
    bundle: Path,
    output: Path,
    minutes: float,
    tokens: int,
    layers: int,
    only: tuple[str, ...],
    measure: bool,
    before: Path | None,
) -> None:
    """Run every check that needs a GPU, on BUNDLE and on random models, and print a verdict."""
    earlier, only = read_figures(before), only + (MEASURED if measure else ())
    bundle, output = bundle.absolute(), output.absolute()
    if bundle != BUNDLE and not (bundle / FILE_NAME).is_file():
        raise PassError(f"{bundle} is not a bundle; make one with pass-export")
    machine = inspect_machine()
    output.mkdir(parents=True, exist_ok=True)
    steps = plan_steps(machine, bundle, tokens, layers)
    chosen = [step for step in steps if not only or step.name.startswith(only)]
    progress = Console(stderr=True)

    def report(results: list[Result]) -> None:
        write_report(output, bundle, machine, results, earlier)
        last = results[-1]
        progress.print(Text(f"{last.name:27} {last.status:8} {last.seconds:4.0f} s  {last.reason}"))

    results = run_steps(chosen, 60 * minutes, output / "gpu_check.log", report)
    click.echo(write_report(output, bundle, machine, results, earlier))
    name, why = verdict(machine, results)
    click.echo(f"VERDICT: {name} ({why})")
    sys.exit(VERDICTS[name])


if __name__ == "__main__":
    main()
