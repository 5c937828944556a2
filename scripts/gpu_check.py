"""Checks if the toolkit works on this machine's GPU, and how fast. Run scripts/gpu_check.sh.

Each step is a process with a deadline that writes JSON: `pass-run bench`, or a function of this
file. Steps whose packages or memory are missing are skipped, with the reason. After every step,
report.json has all results so far; gpu_check.log has what the steps print. The last line is the
verdict, with the exit status: works (0), wrong (1), nothing ran (3), not captured (4: some passes
ran without a CUDA graph).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
from bench_peers import build_genai, open_genai, rate

from pass_runtime import GenerateOptions, PassError, SamplingParams, load, read_manifest
from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.backends.ort import onnxruntime
from pass_runtime.backends.trt.library import LIBRARIES, import_library
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.measuring.lossless import first_difference, run_tokens
from pass_runtime.measuring.real_use import FIRST_LOOK_PROMPTS, encode, read_prompt_set
from pass_runtime.packages import why_no_cuda

ROOT = Path(__file__).resolve().parents[1]
MODEL, LOOKAHEAD = "smollm2-135m", 4
BUNDLE, KEPT = ROOT / f"build/{MODEL}-fp16", ROOT / "build/gpu"
FORMAT = f"--lookahead {LOOKAHEAD} --dtype fp16"
TINY = (
    "--layers=2 --hidden=128 --intermediate=256 --heads=4 --kv-heads=2 --vocab=1024 --positions=256"
)
OF_7B = "--hidden=4096 --intermediate=11008 --heads=32 --kv-heads=8 --positions=8192"
"""Sizes of random models (scripts/random_llama.py)."""
CAPACITIES, GIB_PER_LAYER = (512, 2048, 8192), 0.65
TESTS = ("tests/parity/test_cuda.py", "tests/runtime/test_trt_backend.py")
PLANS = ("ar", "two-pass", "fused", "auto")
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(0.8, seed=1)}
PACKAGES = r"torch|transformers|onnxruntime.*|tensorrt.*|cuda.bindings|numpy"
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
SHOWN_KERNELS, PROFILED_TOKENS = 12, 64
OPTIONAL = ("kernels", "genai")
"""Steps that need a profiler or another engine: their failure is not the toolkit's."""
VERDICTS = {"works": 0, "wrong": 1, "nothing ran": 3, "not captured": 4}
SHOWN = {
    "tokens_per_second": "tokens/s",
    "ratio": "of the first",
    "tau": "tau",
    "milliseconds_per_pass": "ms a pass",
    "host_milliseconds_per_pass": "ms of the host",
    "trunk_milliseconds": "ms trunk",
    "tail_milliseconds": "ms tail",
    "launches": "launches",
    "microseconds": "us",
}
"""The fields of an entry in a step's JSON that the table shows, and their units."""


@dataclass(frozen=True)
class Step:
    """A command, and its deadline in seconds. If it ends with `-o`, the file for its JSON follows.
    blocked: why it cannot run. after: a step that must succeed first."""

    name: str
    command: Sequence[str]
    seconds: int
    blocked: str | None = None
    after: str = ""


@dataclass(frozen=True)
class Result:
    """status: ok, failed or skipped."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


def own(function: str, *arguments: object) -> list[str]:
    """Return the command that calls one of FUNCTIONS."""
    return [sys.executable, __file__, "call", function, *map(str, arguments), "-o"]


def random_llama(model: object, flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts/random_llama.py"), str(model), *flags.split()]


def pass_export(flags: str) -> list[str]:
    return [sys.executable, "-m", "pass_exporter", *flags.split()]


def plan_steps(
    machine: Mapping[str, Any], bundle: Path, tokens: int, layers: int, measure: bool
) -> list[Step]:
    """Return the steps, those that say most first. machine: of `inspect`. measure: without TensorRT
    and tests."""
    missing, steps = machine["missing"], list[Step]()
    devices = ["cuda"] if measure else ["cuda", *LIBRARIES]

    def bench(flags: str, path: Path = bundle) -> list[str]:
        command = [sys.executable, "-m", "pass_runtime", "bench", str(path)]
        return [*command, *flags.split(), "-o"]

    for device in devices:
        steps.append(Step(f"parity {device}", own("parity", device), 120, missing.get(device)))
    exported, lookahead, longest, built = "", LOOKAHEAD, 2048, set[str]()
    if (bundle / FILE_NAME).is_file():
        manifest = read_manifest(bundle)
        lookahead, built = manifest.lookahead.length, {each.library for each in manifest.engines}
        longest = min(longest, manifest.model.max_capacity)
    else:
        exported, flags = "export", f"--model {MODEL} {FORMAT} -o {bundle}"
        steps.append(Step(exported, pass_export(flags), 180))
    plans = " ".join(f"--plan {plan}" for plan in PLANS)
    measured = {
        "rows": f"--rows 1,{lookahead + 1},{(lookahead + 1) ** 2}",
        "greedy": f"{plans} --draft lookahead --draft both --max-new-tokens {tokens}",
        "sampled": f"{plans} --max-new-tokens {tokens} --temperature 0.8 --seed 1",
    }
    for device in devices:
        blocked, after = missing.get(device), exported
        if device in LIBRARIES and device not in built:
            after, flags = f"build {device}", f"--engine {device} --max-seq-len {longest}"
            command = pass_export(f"build {bundle} {flags}")
            steps.append(Step(after, command, 180, blocked, exported))
        for name, flags in measured.items():
            command = bench(f"--device {device} {flags}")
            steps.append(Step(f"{name} {device}", command, 150, blocked, after))
    cuda = missing.get("cuda")
    flags = f"--plan ar --plan fused --batch 1,8,32 --max-new-tokens {tokens} --device cuda"
    steps.append(Step("batch", bench(flags), 180, cuda, exported))
    steps.append(Step("kernels", own("kernels", bundle), 90, cuda, exported))
    command = own("genai", bundle, tokens)
    steps.append(Step("genai", command, 180, missing.get("genai"), exported))
    if machine["gib"] < GIB_PER_LAYER * layers:
        cuda = cuda or f"{layers} layers need {GIB_PER_LAYER * layers:.0f} GiB of GPU memory"
    model, large, exported = KEPT / f"7b-{layers}", KEPT / f"7b-{layers}-bundle", ""
    if not (large / FILE_NAME).is_file():
        command, exported = random_llama(model, f"{OF_7B} --layers={layers}"), "export 7B"
        steps.append(Step("random 7B", command, 120, cuda))
        command = pass_export(f"--model {model} {FORMAT} -o {large}")
        steps.append(Step(exported, command, 300, cuda, "random 7B"))
    for capacity in CAPACITIES:  # the cache is full up to the widest window
        command = bench(f"--device cuda --rows 1,5,25 --cached {capacity - 25}", large)
        steps.append(Step(f"7B at {capacity}", command, 120, cuda, exported))
    if not measure:
        # The project's addopts need plugins that may be missing.
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", *TESTS]
        steps.append(Step("tests", command, 200))
    return steps


def inspect() -> dict[str, Any]:
    """Return the GPU, the versions of packages, and why parts cannot be used."""
    device = find_device()
    if device is None:
        raise PassError(why_no_device())
    missing = {name: library.unknown_target([device.target]) for name, library in LIBRARIES.items()}
    for name, library in LIBRARIES.items():
        try:
            import_library(library)
        except Exception as error:  # an incomplete installation can raise any error
            missing[name] = missing[name] or " ".join(str(error).split())
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        missing["cuda"] = why_no_cuda()
    if find_spec("onnxruntime_genai") is None:
        missing["genai"] = "not installed; run: pip install onnxruntime-genai-cuda"
    versions = {each.name: each.version for each in distributions()}
    return {
        "gpu": f"{device.name}, {device.target}",
        "gib": device.total / 2**30,
        "versions": {name: versions[name] for name in versions if re.fullmatch(PACKAGES, name)},
        "missing": {name: why for name, why in missing.items() if why},
    }


def parity(device: str) -> dict[str, Any]:
    """Check that every plan of a tiny fp32 model writes on the device what the CPU writes."""
    prompt, wrong = list(range(3, 30)), list[str]()
    with tempfile.TemporaryDirectory() as directory:
        model, bundle = f"{directory}/model", f"{directory}/bundle"
        commands = [random_llama(model, TINY)]
        commands.append(pass_export(f"--model {model} --lookahead {LOOKAHEAD} -o {bundle}"))
        if device in LIBRARIES:
            commands.append(pass_export(f"build {bundle} --engine {device} --max-seq-len 256"))
        for command in commands:
            if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
                raise PassError("the tiny model could not be made, see above")
        with load(bundle, "cpu", threads=1) as on_cpu, load(bundle, device) as tested:
            for sampling in (*SAMPLINGS.values(), SamplingParams(1.0, 50, 0.9, seed=7)):
                options = GenerateOptions(40, sampling, plan="ar", ignore_eos=True)
                expected = run_tokens(on_cpu, prompt, options).token_ids
                for plan in PLANS:
                    written = run_tokens(tested, prompt, replace(options, plan=plan)).token_ids
                    difference = first_difference(on_cpu, prompt, options, expected, written)
                    if difference is not None and not difference.is_near_tie:
                        wrong.append(f"{plan}, T={sampling.temperature}: {difference}")
            uncaptured = tested.backend.uncaptured
    if wrong:
        raise PassError(f"{device} writes other tokens than the CPU: {'; '.join(wrong)}")
    return {"uncaptured": uncaptured}


def kernels(bundle: str) -> dict[str, Any]:
    """Time the kernels of a pass by name, with torch's profiler."""
    import torch

    torch.cuda.init()
    entries = list[dict[str, Any]]()
    with load(bundle, "cuda", max_batch_size=1) as session, tempfile.TemporaryDirectory() as folder:
        for plan, (name, sampling) in itertools.product(("ar", "fused"), SAMPLINGS.items()):
            options = GenerateOptions(PROFILED_TOKENS, sampling, plan=plan, ignore_eos=True)
            # A prompt of one token needs no prefill. The first run captures everything.
            session.generate_ids([3], options).result()
            with torch.profiler.profile([torch.profiler.ProfilerActivity.CUDA]) as recorded:
                passes = session.generate_ids([3], options).result().stats.passes
                torch.cuda.synchronize()
            trace = Path(folder, "trace.json")
            recorded.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
            entries += kernel_entries(f"{plan}, {name}", events, passes)
        return {"kernels": entries, "uncaptured": session.backend.uncaptured}


def kernel_entries(plan: str, events: Iterable[Mapping[str, Any]], passes: int) -> list[Any]:
    """Return launches and microseconds of a pass, of all kernels and the longest. events: of a
    Chrome trace."""
    times = defaultdict[str, list[float]](list)
    for event in events:
        if event.get("cat") in GPU_EVENTS:
            times["all"].append(event["dur"])
            times[short_name(event["name"])].append(event["dur"])
    if not times:
        raise PassError("the profiler saw no kernels: CUPTI may not be allowed here")
    longest = sorted(times, key=lambda name: -sum(times[name]))[: 1 + SHOWN_KERNELS]
    return [
        {
            "plan": f"{plan}: {name}",
            "launches": len(times[name]) / passes,
            "microseconds": sum(times[name]) / passes,
        }
        for name in longest
    ]


def short_name(name: str) -> str:
    """Return a name without types, namespaces and parameters, but for the argument that says what
    kernels of ONNX Runtime and CUTLASS compute."""
    operation = re.search(r"\b(OP_|cutlass_)\w+", name)
    name = name.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = re.sub(r"(\(anonymous namespace\)|\w+)::", "", name).partition("(")[0].strip()
    return f"{name} {operation[0]}" if operation and operation[0] != name else name


def genai(bundle: str, tokens: str) -> dict[str, Any]:
    """Time onnxruntime-genai, without drafts, on bench's prompts."""
    directory = build_genai(Path(bundle), KEPT / "genai-cuda/fp16", "cuda")
    with load(bundle, "cpu") as session:
        prompts = [encode(session, prompt) for prompt in read_prompt_set(FIRST_LOOK_PROMPTS)]
    write, texts = open_genai(directory, 0), []
    for ids in prompts:
        write(ids, int(tokens), ignore_eos=True)  # to warm up
        texts.append(write(ids, int(tokens), ignore_eos=True))
    speed = rate(texts)
    entry = {"tokens_per_second": speed, "milliseconds_per_pass": 1000 / speed}
    return {"plans": [{"plan": "genai fp16"} | entry]}


FUNCTIONS = {each.__name__: each for each in (inspect, parity, kernels, genai)}


def run_step(step: Step, limit: float, log: Path) -> Result:
    """Run a step in a process group, which is killed after `limit` seconds and at Ctrl-C."""
    started, output, reason = time.monotonic(), log.with_name("step.json"), ""
    command = [*step.command, str(output)] if step.command[-1] == "-o" else [*step.command]
    with log.open("a+", encoding="utf-8", errors="replace") as file:
        print(f"\n=== {step.name}: {' '.join(command)}", file=file, flush=True)
        begin = file.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status, reason = 1, f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(begin)
        lines = [line.strip() for line in file if line.strip()]
    data = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {}
    output.unlink(missing_ok=True)
    if status:
        reason = reason or " / ".join(lines[-3:]) or f"status {status}"
    state, seconds = "failed" if status else "ok", time.monotonic() - started
    return Result(step.name, state, reason, seconds, data)


def run_steps(
    steps: Sequence[Step], budget: float, report: dict[str, Any], output: Path
) -> list[Result]:
    """Run the steps within `budget` seconds, and add their results to report.json one by one."""
    deadline, results = time.monotonic() + budget, dict[str, Result]()
    for step in steps:
        left, before = deadline - time.monotonic(), results.get(step.after)
        reason = step.blocked or ("the time is over" if left < 1 else "")
        if before is not None and before.status != "ok":
            reason = reason or f"{step.after} did not run"
        if reason:
            result = Result(step.name, "skipped", reason)
        else:
            result = run_step(step, min(step.seconds, left), output / "gpu_check.log")
            if result.status == "failed" and left < step.seconds and time.monotonic() > deadline:
                result = replace(result, status="skipped", reason="the time is over")
        results[step.name] = result
        report["steps"] = [asdict(each) for each in results.values()]
        write_json(report, output / "report.json")
        click.echo(f"{step.name:20} {result.status:8} {result.seconds:4.0f} s", err=True)
    return [*results.values()]


def verdict(results: Sequence[Result]) -> tuple[str, str]:
    """Return one of VERDICTS, and its reason."""
    failed = [each for each in results if each.status == "failed" and each.name not in OPTIONAL]
    ran = [each for each in results if each.status == "ok" and "uncaptured" in each.data]
    if failed and failed[0].name != "inspect":
        return "wrong", f"{failed[0].name}: {failed[0].reason}"
    if not ran:
        return "nothing ran", next((each.reason for each in results if each.reason), "no step")
    for result in ran:
        for name, why in result.data["uncaptured"].items():
            return "not captured", f"{result.name}: {name}: {why}"
    return "works", f"{len(ran)} steps on the GPU"


def table(results: Iterable[Result]) -> list[dict[str, str]]:
    """Return a row for each entry of a step's JSON, or for the step."""
    rows = []
    for result in results:
        data = result.data
        for entry in data.get("plans") or data.get("rows") or data.get("kernels") or [{}]:
            named = (f"{entry[key]:.4g} {unit}" for key, unit in SHOWN.items() if entry.get(key))
            what = entry.get("plan") or entry.get("window") or result.status
            figures = ", ".join(named) or result.reason
            rows.append({"step": result.name, "what": what, "figures": figures})
    return rows


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path), default=BUNDLE)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=KEPT, help="For results.")
@click.option("--minutes", type=float, default=10, help="Time for all steps.")
@click.option("--tokens", type=click.IntRange(1), default=64, help="Length of answers.")
@click.option("--layers", type=click.IntRange(1), default=4, help="Of a random 7B, which has 32.")
@click.option("--only", multiple=True, help="Steps whose names begin so; repeatable.")
@click.option("--measure", is_flag=True, help="Leave out TensorRT and the tests.")
@one_line_errors
def main(
    bundle: Path,
    output: Path,
    minutes: float,
    tokens: int,
    layers: int,
    only: tuple[str, ...],
    measure: bool,
) -> None:
    """Run every check that needs a GPU, on BUNDLE and on random models, and print a verdict."""
    bundle, output = bundle.absolute(), output.absolute()
    if bundle != BUNDLE and not (bundle / FILE_NAME).is_file():
        raise PassError(f"{bundle} is not a bundle; make one with pass-export")
    output.mkdir(parents=True, exist_ok=True)
    found = run_step(Step("inspect", own("inspect"), 60), 60, output / "gpu_check.log")
    results = [found]
    if found.data:
        steps = plan_steps(found.data, bundle, tokens, layers, measure)
        steps = [step for step in steps if not only or step.name.startswith(only)]
        report = {"bundle": str(bundle), **found.data}
        results = run_steps(steps, 60 * minutes, report, output)
    name, why = verdict(results)
    show_rows(found.data.get("gpu", "no GPU"), table(results), left=("step", "what", "figures"))
    click.echo(f"VERDICT: {name} ({why})")
    sys.exit(VERDICTS[name])


if __name__ == "__main__":
    if sys.argv[1:2] == ["call"]:
        _, _, function, *arguments, _, path = sys.argv
        call = one_line_errors(lambda: write_json(FUNCTIONS[function](*arguments), Path(path)))
        call()
    else:
        main()
