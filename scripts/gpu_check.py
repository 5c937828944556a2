"""Runs everything that needs a GPU, one step after another, within a time budget: see scripts/gpu_check.sh.

    scripts/gpu_check.sh build/smollm2-135m-fp16 -o build/gpu

Steps are processes of their own: the tests with `-m gpu`, engines of every TensorRT library that knows this GPU,
`pass-run bench` on every device that works (greedy and sampled) and `pass-cpp bench` where it is built,
scripts/gpu_peers.py, and scripts/step_time.py. A step that cannot be run is skipped with the reason. DIR has
gpu_check.json and .md, written after every step, and gpu_check.log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pass_exporter.model.registry import registry
from pass_runtime.backends.cuda import find_device
from pass_runtime.backends.trt.library import LIBRARIES, import_library
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.errors import one_line_errors
from pass_runtime.cli.tables import show_rows
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
MODEL, BUNDLE = "smollm2-135m", ROOT / "build/smollm2-135m-fp16"
TESTS = ("tests/parity/test_cuda.py", "tests/runtime/test_trt_backend.py")
PLANS = "--plan ar --plan two-pass --plan fused --plan auto --draft lookahead --draft ngram --draft both"
DEVICES = ("cuda", *LIBRARIES)
PROGRAM = ROOT / "build/cpp/release/pass-cpp"
PROMPT = "504,3575,282,4649,314,253,2591,216"
"""The prompt for the C++ runtime, as token ids of SmolLM2: for text it would need another library."""
OUTPUT = "{output}"
"""Stands in a command for the file into which the step writes its JSON."""
SMI = "name,driver_version,memory.total,power.limit,compute_cap,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem"
PACKAGES = "torch|triton|transformers|onnxruntime.*|tensorrt.*|cuda.bindings|numpy"
SEQUENCE, LARGE = 2048, 24
"""The capacity of engines in tokens; the GiB that a 7B model in fp16 with a capacity of 8192 tokens needs to run."""
SECONDS = {"export": (40, 180), "tests": (20, 150), "build": (30, 180), "bench": (20, 100), "peers": (45, 120)}
SECONDS |= {"step-time": (60, 600), "cpp": (20, 100)}
"""Seconds by the first word of a step's name: those of the budget that it needs to start, and its own limit."""
BENCH = ("plan", "tokens_per_second", "ratio", "milliseconds_per_pass", "host_milliseconds_per_pass", "tau")
TABLES = {
    "bench": ("plans", BENCH),
    "cpp": ("plans", BENCH),
    "peers": ("peers", ("name", "tokens_per_second", "ratio", "milliseconds_per_pass", "same_tokens")),
    "step-time": ("cells", ("rows", "capacity", "milliseconds", "ratio", "bound_fraction")),
}
"""The entries of a step's JSON that are shown, and their fields."""


@dataclass(frozen=True)
class Found:
    """The GPU and its libraries. gpu: nvidia-smi's fields of GPU 0, empty without a GPU. target: such as `sm90`.
    memory: GiB. missing: the reasons why any of cuda (ONNX Runtime), tensorrt, tensorrt-rtx, torch, cuda-python cannot
    be used."""

    gpu: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    memory: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A command to run. blocked: the reason why it cannot be run. after: steps that must have succeeded."""

    name: str
    command: Sequence[str] = ()
    blocked: str | None = None
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Result:
    """The result of a step. status: ok, failed or skipped. data: the JSON that it wrote, even if it failed later."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    data: Any = None


def look() -> Found:
    """Run `find` in another process, so that the libraries hold no GPU memory while steps are timed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find).result()


def find() -> Found:
    gpu, device = nvidia_smi(), find_device()
    if not gpu and device is None:
        smi = "shows none" if shutil.which("nvidia-smi") else "is not installed"
        return Found(missing={"gpu": f"nvidia-smi {smi}, and cuda-python finds none either"})
    gpu = gpu or {"name": device.name, "memory.total": f"{device.total >> 20} MiB"}
    target = device.target if device else "sm" + gpu["compute_cap"].replace(".", "")
    missing = {name: why_not(name) for name in ("cuda", "torch")}
    missing["cuda-python"] = "" if device else "cuda-python does not see the GPU; install cuda-python"
    for name, library in LIBRARIES.items():
        foreign = library.targets and target not in library.targets
        wrong = f"{name} has no target {target}; it has {', '.join(library.targets)}" if foreign else ""
        missing[name] = wrong or missing["cuda-python"] or why_not(name)
    installed = dict(sorted((d.name, d.version) for d in distributions() if re.fullmatch(PACKAGES, d.name or "", re.I)))
    memory = device.total / 2**30 if device else float(gpu["memory.total"].split()[0]) / 1024
    return Found(gpu, target, memory, installed, {name: why for name, why in missing.items() if why})


def nvidia_smi() -> dict[str, str]:
    """Return the fields SMI of GPU 0, or {} if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in answer.split(",")]
    return dict(zip(SMI.split(","), values, strict=True)) if len(values) == len(SMI.split(",")) else {}


def why_not(name: str) -> str:
    """Return the reason why a library cannot be used on the GPU, or ""."""
    try:
        if name in LIBRARIES:
            import_library(LIBRARIES[name])
        elif name == "torch":
            torch = importlib.import_module("torch")
            return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
        elif "CUDAExecutionProvider" not in importlib.import_module("onnxruntime").get_available_providers():
            return "this onnxruntime has no CUDAExecutionProvider; install onnxruntime-gpu in its place"
    except Exception as error:  # a library that is half installed can raise anything
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def plan_steps(found: Found, bundle: Path, tokens: int) -> list[Step]:
    """All steps in their order; what cannot be run says why."""
    manifest = read_manifest(bundle) if (bundle / FILE_NAME).is_file() else None
    model = manifest.model.name if manifest else MODEL
    length = min(SEQUENCE, manifest.model.max_capacity) if manifest else SEQUENCE
    tool, missing, exported = (sys.executable, "-m"), found.missing, () if manifest else ("export",)
    flags = f"--model {MODEL} --lookahead 4 --dtype fp16 -o".split()
    steps = [] if manifest else [Step("export", (*tool, "pass_exporter.cli", *flags, str(bundle)))]
    flags = ["-q", "-m", "gpu", "-o", "addopts=-ra"]  # the project's addopts need plugins that may not be here
    blocked = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    steps.append(Step("tests", (*tool, "pytest", *flags, *TESTS), blocked))
    for name in LIBRARIES:
        command = (*tool, "pass_exporter.cli", "build", str(bundle), "--engine", name, "--max-seq-len", str(length))
        steps.append(Step(f"build {name}", command, missing.get(name), exported))
    unbuilt = None if PROGRAM.exists() else "no C++ runtime; run scripts/build_cpp.sh"
    for name in DEVICES:
        after = (f"build {name}",) if name in LIBRARIES else exported
        flags = [str(bundle), *f"{PLANS} --device {name} --max-new-tokens {tokens} -o {OUTPUT}".split()]
        for kind, sampling in {"greedy": "", "sampled": "--temperature 0.8 --seed 1"}.items():
            command = (*tool, "pass_runtime.cli.main", "bench", *flags, *sampling.split())
            steps.append(Step(f"bench {name} {kind}", command, missing.get(name), after))
        command = (str(PROGRAM), "bench", *flags, "--prompt-ids", PROMPT)
        steps.append(Step(f"cpp {name}", command, missing.get(name) or unbuilt, after))
    unknown = None if model in registry() else f"{model} is not in models/registry.toml; see scripts/gpu_peers.py"
    dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(manifest.model.dtype if manifest else "", "fp16")
    flags = ["--model", model, *f"--dtype {dtype} --tokens {tokens} -o {OUTPUT}".split()]
    steps.append(Step("peers", (sys.executable, "scripts/gpu_peers.py", *flags), missing.get("torch") or unknown))
    small = f"7B need {LARGE} GiB, this GPU has {found.memory:.0f}" if found.memory < LARGE else ""
    for name in DEVICES:
        flags = f"--engine {name} --keep build/step-time -o {OUTPUT}".split()
        blocked = missing.get(name) or missing.get("cuda-python") or small
        steps.append(Step(f"step-time {name}", (sys.executable, "scripts/step_time.py", *flags), blocked))
    return steps


def run_steps(steps: Sequence[Step], budget: float, log: Path, done: Callable[[list[Result]], None]) -> list[Result]:
    """Run the steps one after another; `done` gets all results so far after every step. budget: seconds for all."""
    started, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            left = budget - (time.monotonic() - started)
            reason = why_skip(step, results, left)
            results.append(Result(step.name, "skipped", 0, reason) if reason else run_step(step, left, log, scratch))
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


def run_step(step: Step, left: float, log: Path, scratch: str) -> Result:
    """Run a step in a process group of its own, which is ended after its time, or on Ctrl-C."""
    output, kind = Path(scratch, f"{step.name}.json"), step.name.split()[0]
    limit, started = min(SECONDS[kind][1], left), time.monotonic()
    command = [str(output) if word == OUTPUT else word for word in step.command]
    with log.open("a+b") as file:
        file.write(f"\n=== {step.name}: {' '.join(command)}\n".encode())
        file.flush()
        begin = file.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status, reason = "failed" if process.wait(limit) else "ok", ""
        except subprocess.TimeoutExpired:
            status, why = ("failed", "its limit") if limit < left else ("skipped", "the end of the budget")
            reason = f"stopped after {limit:.0f} s, {why}"
        finally:
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group of the step, including children of children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(5)


def tables(found: Found, results: Sequence[Result]) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table by its title: the machine, the steps, and what they measured."""
    facts = {**found.gpu, **found.versions}
    shown = {"GPU and libraries": [{"": name, "as found": value} for name, value in facts.items()], "steps": []}
    for step in results:
        row = {"step": step.name, "status": step.status, "seconds": f"{step.seconds:.0f}", "reason": step.reason}
        shown["steps"].append(row)
        entries, keys = TABLES.get(step.name.split()[0], ("", ()))
        if entries and step.data:
            shown[step.name] = [
                {key.replace("_", " "): _cell(entry.get(key)) for key in keys} for entry in step.data[entries]
            ]
    return shown


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value or "-")


def write_report(directory: Path, bundle: Path, found: Found, results: Sequence[Result]) -> None:
    """Write gpu_check.json and gpu_check.md, each beside its place and renamed."""
    report = {"bundle": str(bundle), **asdict(found), "steps": [asdict(result) for result in results]}
    text = ""
    for title, rows in tables(found, results).items():
        headings = [*rows[0]] if rows else []
        lines = [headings, ["---"] * len(headings), *(row.values() for row in rows)]
        shown = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        text += f"## {title}\n\n" + "".join(f"| {line} |\n" for line in shown) + "\n"
    write_json(report, directory / "gpu_check.json")
    write_whole(directory / "gpu_check.md", text)


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=BUNDLE)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=ROOT / "build/gpu", help="For the results.")
@click.option("--budget", type=float, default=480, show_default=True, help="Seconds for all steps.")
@click.option("--tokens", type=int, default=64, show_default=True, help="For each prompt, in bench, cpp and peers.")
@click.option("--only", multiple=True, help="Steps whose names begin with this; repeatable.  [default: all]")
@one_line_errors
def main(bundle: Path, output: Path, budget: float, tokens: int, only: tuple[str, ...]) -> None:
    """Run everything that needs a GPU on BUNDLE. Status 0 if nothing failed, 1 if a step did, 2 without a GPU."""
    bundle, output = bundle.absolute(), output.absolute()
    found = look()
    if not found.gpu:
        raise PassError(f"no NVIDIA GPU: {found.missing['gpu']}")
    if bundle != BUNDLE and not (bundle / FILE_NAME).is_file():
        raise PassError(f"{bundle} is not a bundle; make one with pass-export")
    output.mkdir(parents=True, exist_ok=True)
    steps = [step for step in plan_steps(found, bundle, tokens) if not only or step.name.startswith(only)]
    progress = Console(stderr=True)

    def done(results: list[Result]) -> None:
        write_report(output, bundle, found, results)
        last = results[-1]
        progress.print(Text(f"{last.name:27} {last.status:8} {last.seconds:4.0f} s  {last.reason}"))

    results = run_steps(steps, budget, output / "gpu_check.log", done)
    for title, rows in tables(found, results).items():
        shown = [{heading: escape(cell) for heading, cell in row.items()} for row in rows]
        show_rows(title, shown, left=("", "as found", "step", "status", "reason", "plan", "name"))
    sys.exit(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    main()
