"""The steps of scripts/gpu_check.py that are not commands of the toolkit.

They check that the device works, compare the text of a tiny model with the CPU's, and time passes
by rows, the kernels of passes by name, and onnxruntime-genai. Kernels are recorded by torch's
profiler, through NVIDIA's CUPTI, which CUDA builds of torch bring: it sees all kernels of the
process, whoever launched them, also those in captured graphs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from bench_engines import build_genai, open_genai, rate
from gpu_report import why_no_profiler

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session, load, read_manifest
from pass_runtime.backends.cuda import (
    ON_DEVICE,
    Cuda,
    find_device,
    import_api,
    unwrap,
    why_no_device,
)
from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.bench_rows import RowsOptions, measure_rows
from pass_runtime.commands.errors import one_line_errors
from pass_runtime.measuring.lossless import first_difference, run_tokens, token_scores
from pass_runtime.measuring.real_use import FIRST_LOOK_PROMPTS, encode, read_prompt_set

COPY_BYTES, TIMED_COPY_BYTES, TIMED_COPIES = 1 << 20, 1 << 30, 10
"""Bytes of the copy that is compared; bytes and number of the copies that are timed."""
SIZE_NAMES = ("hidden", "intermediate", "heads", "kv-heads", "vocab", "positions")
TINY_SIZES = {"layers": 2, **dict(zip(SIZE_NAMES, (128, 256, 4, 2, 1024, 256), strict=True))}
SIZES_OF_7B = dict(zip(SIZE_NAMES, (4096, 11008, 32, 8, 32000, 8192), strict=True))
"""Sizes of random models, by the option of scripts/random_llama.py. Those of 7B are LLaMA-7B's, but
with 8 KV heads, as in newer models."""
PLANS, TOKENS = ("ar", "two-pass", "fused", "auto"), 40
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.9, 7))
FP16_BYTES, SAVED_LOGITS = 2, 512
"""Bytes of an fp16 number; the number of logits that are saved."""
GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events that occupy the GPU."""
SHOWN_KERNELS, MAX_NAME_LENGTH = 20, 70
"""Kernels of a pass that get a row each; a row sums up the others. Longer names are cut."""
PROFILED_TOKENS = 64
PROFILED = {
    f"{plan}, {name}": (plan, sampling)
    for plan in ("ar", "fused")
    for name, sampling in {"greedy": SamplingParams(), "T=0.8": SamplingParams(0.8, seed=1)}.items()
}
"""Plans and sampling of the passes whose kernels are timed, by the name in the report."""
Event = Mapping[str, Any]
"""An event of a Chrome trace: name, cat (its category), dur (microseconds)."""
Profile = Callable[[Callable[[], int]], tuple[Iterable[Event], int]]
"""Calls a function, and returns the events that it causes, and its result."""


def check_device(api: Any) -> dict[str, Any]:
    """Check copies, and their capture in a CUDA graph. Return the results as the report has them.

    checks: entries of check and result. uncaptured: the reason, if a copy was not captured.
    copy_bandwidth: bytes per second that copies in GPU memory read and write. Raises PassError if
    the device fails, or changes the copied bytes.
    """
    device = find_device(api)
    if device is None:
        raise PassError(why_no_device(api))
    checks = {"GPU": f"{device.name}, {device.target}"}
    checks["memory"] = f"{device.free >> 20} of {device.total >> 20} MiB free"
    for name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"):
        if hasattr(api, name):
            version = unwrap(getattr(api, name)(), name)
            checks[name] = f"{version // 1000}.{version % 1000 // 10}"
    cuda, uncaptured = Cuda(api), {}
    try:
        sent = np.random.default_rng(0).integers(0, 256, COPY_BYTES, np.uint8)
        address, pinned = cuda.allocate(COPY_BYTES), cuda.pinned((COPY_BYTES,), np.uint8)
        received = np.zeros_like(sent)
        cuda.upload(address, sent)
        cuda.download(received, address)
        _compare(received, sent, "a copy to the GPU and back")
        checks["copy"] = "unchanged"
        try:
            graph = cuda.capture(lambda: cuda.enqueue_download(pinned, address))
        except PassError as error:
            uncaptured["a copy"] = checks["capture"] = str(error)
        else:
            for replay in range(2):
                cuda.upload(address, np.roll(sent, replay))
                cuda.launch(graph)
                cuda.synchronize()
                _compare(pinned, np.roll(sent, replay), "a captured copy")
            checks["capture"] = "replayed twice"
        bandwidth = _copy_bandwidth(api, cuda, min(TIMED_COPY_BYTES, device.free // 4))
        checks["copies in GPU memory"] = f"{bandwidth / 1e9:.0f} GB/s"
    finally:
        cuda.close()
    entries = [{"check": name, "result": result} for name, result in checks.items()]
    return {"checks": entries, "uncaptured": uncaptured, "copy_bandwidth": bandwidth}


def _compare(copied: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], what: str) -> None:
    if wrong := int((copied != expected).sum()):
        raise PassError(
            f"{what} changed {wrong} of {expected.size} bytes: the GPU or its driver is broken"
        )


def _copy_bandwidth(api: Any, cuda: Cuda, size: int) -> float:
    """Return the bytes per second that copies of `size` bytes in GPU memory read and write."""
    source, target = cuda.allocate(size), cuda.allocate(size)

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(TIMED_COPIES):
            unwrap(api.cudaMemcpyAsync(target, source, size, ON_DEVICE, cuda.stream))
        cuda.synchronize()
        return time.perf_counter() - started

    return 2 * size * TIMED_COPIES / min(seconds() for _ in range(3))


def make_bundle(place: Path, device: str, sizes: Mapping[str, int], **options: Any) -> Path:
    """Export a random Llama into `place`, and build engines if `device` needs them. Return the
    bundle.

    A bundle and engines that are there already are reused. options: of ExportConfig.
    """
    from rich.console import Console

    from pass_exporter.config import EngineConfig, ExportConfig
    from pass_exporter.engines.build import build_engines
    from pass_exporter.export import export
    from pass_exporter.terminal import Terminal

    model, bundle = place / "model", place / options.get("cuda_attention", "bundle")
    with Terminal(Console(stderr=True)) as progress:
        if not (bundle / FILE_NAME).is_file():
            script = Path(__file__).with_name("random_llama.py")
            flags = [f"--{name}={size}" for name, size in sizes.items()]
            subprocess.run([sys.executable, script, model, *flags], check=True)
            export(ExportConfig(str(model), lookahead=4, output=bundle, **options), progress)
        built = [engines.library for engines in read_manifest(bundle).engines]
        if device in LIBRARIES and device not in built:
            build_engines(bundle, EngineConfig(device, max_seq_len=sizes["positions"]), progress)
    return bundle


def compare_plans(expected: Session, tested: Session) -> dict[str, Any]:
    """Check for every plan if `tested` writes what `expected` writes by `ar`, but for near-ties.

    Return entries of plan, same_tokens and captured, and what was not captured and why.
    """
    prompt, plans = list(range(3, 30)), []
    for plan in PLANS:
        same = True
        for sampling in SAMPLINGS:
            options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)
            text = run_tokens(expected, prompt, replace(options, plan="ar")).token_ids
            written = run_tokens(tested, prompt, options).token_ids
            difference = first_difference(expected, prompt, options, text, written)
            same &= difference is None or difference.is_near_tie
        plans.append({"plan": plan, "same_tokens": same, "captured": not tested.backend.uncaptured})
    return {"plans": plans, "uncaptured": tested.backend.uncaptured}


def time_rows(
    session: Session, rows: Sequence[int], capacity: int, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Time the trunk by number of rows, with a KV cache that is full except for the widest window.

    Return an entry for each window of so many rows: the milliseconds of the trunk, and the bytes
    that a pass reads for each layer and for the LM head (fp16).
    """
    widest = max(*rows, session.backend.capabilities.least_width)
    request = RowsOptions(SamplingParams(), tuple(rows), cached=capacity - widest)
    hidden = sizes["hidden"]
    key_size = hidden // sizes["heads"] * sizes["kv-heads"]
    # Matrices of q and o, of k and v, and three of the MLP.
    weights = hidden * (2 * hidden + 2 * key_size + 3 * sizes["intermediate"])
    shared = {"layers": sizes["layers"], "capacity": capacity}
    shared["layer_bytes"] = FP16_BYTES * (weights + 2 * key_size * capacity)
    shared["other_bytes"] = FP16_BYTES * hidden * sizes["vocab"]
    return [
        {
            **{name: row[name] for name in ("window", "rows", "ratio")},
            **shared,
            "milliseconds": row["trunk_milliseconds"],
        }
        for row in measure_rows(session, request, [[3]])["rows"]  # any token does
    ]


def profile(work: Callable[[], int]) -> tuple[list[Event], int]:
    """Record the GPU's events while `work` runs, as a `Profile` does."""
    import torch

    torch.cuda.init()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        result = work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "trace.json")
        recorded.export_chrome_trace(str(trace))
        return list(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]), result


def short_name(name: str) -> str:
    """Return a kernel's name without return type, namespaces, parameters and template arguments.

    One argument stays: that by which kernels of ONNX Runtime and CUTLASS say what they compute.
    """
    operation = re.search(r"\b(OP_|cutlass_)\w+", name)
    name = name.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = re.sub(r"(\(anonymous namespace\)|\w+)::", "", name).partition("(")[0].strip()
    name = name or "unnamed"
    if operation and operation[0] != name:
        name = f"{name} {operation[0]}"
    return name[:MAX_NAME_LENGTH]


def kernel_rows(plan: str, events: Iterable[Event], passes: int) -> list[dict[str, Any]]:
    """Return a row for all kernels together, then a row for each name, the longest times first.

    Each row has the launches and the microseconds of one pass. passes: how many passes the events
    come from. Raises PassError if there are no kernels.
    """
    times = defaultdict[str, list[float]](list)
    for event in events:
        if event.get("cat") in GPU_EVENTS:
            times[short_name(event["name"])].append(event["dur"])
    if not times:
        raise PassError(
            "the profiler saw no kernels: CUPTI may not be allowed here, or another profiler "
            "is running"
        )
    names = sorted(times, key=lambda name: -sum(times[name]))

    def row(label: str, names: Sequence[str]) -> dict[str, Any]:
        launches = sum(len(times[name]) for name in names) / passes
        microseconds = sum(sum(times[name]) for name in names) / passes
        return {"plan": plan, "kernel": label, "launches": launches, "microseconds": microseconds}

    shown, others = names[:SHOWN_KERNELS], names[SHOWN_KERNELS:]
    rows = [row("all", names), *(row(name, [name]) for name in shown)]
    return [*rows, row(f"{len(others)} others", others)] if others else rows


def time_kernels(session: Session, run: Profile = profile) -> dict[str, Any]:
    """Return `kernel_rows` of each of PROFILED.

    The prompt is one token, so that nothing but passes of the plan runs. Each text is written once
    before it is profiled, so that everything is captured.
    """
    rows = []
    for name, (plan, sampling) in PROFILED.items():
        options = GenerateOptions(PROFILED_TOKENS, sampling, plan=plan, ignore_eos=True)

        def write(options: GenerateOptions = options) -> int:
            return session.generate_ids([3], options).result().stats.passes

        write()
        events, passes = run(write)
        rows += kernel_rows(name, events, passes)
    return {"kernels": rows, "uncaptured": session.backend.uncaptured}


PATH = click.Path(path_type=Path)
BUNDLE = click.argument("bundle", type=PATH)
OUTPUT = click.option("-o", "--output", type=PATH, help="Write the results here, as JSON.")
DEVICE = click.option("--device", default="cuda")
KEEP = click.option(
    "--keep", type=PATH, default=Path("build/gpu"), help="Directory for models, which are reused."
)


@click.group(context_settings={"show_default": True})
def main() -> None:
    """Run one step of scripts/gpu_check.py."""


@main.command()
@OUTPUT
@one_line_errors
def device(output: Path | None) -> None:
    """Check that copies to and in GPU 0 work, and that they can be captured in a CUDA graph."""
    report = check_device(import_api())
    write_json(report, output)
    for each in report["checks"]:
        click.echo(f"{each['check']}: {each['result']}")


@main.command()
@DEVICE
@OUTPUT
@one_line_errors
def tiny(device: str, output: Path | None) -> None:
    """Check that every plan of a tiny model writes the same text on DEVICE as on the CPU. Its
    weights are fp32, so texts differ only by a bug or a near-tie."""
    with tempfile.TemporaryDirectory() as directory:
        bundle = make_bundle(Path(directory), device, TINY_SIZES)
        with load(bundle, "cpu", threads=1) as on_cpu, load(bundle, device) as on_device:
            report = compare_plans(on_cpu, on_device)
    write_json(report, output)
    if wrong := [each["plan"] for each in report["plans"] if not each["same_tokens"]]:
        raise PassError(
            f"{', '.join(wrong)} on {device} write other tokens than the CPU; please report it"
        )
    click.echo(f"{device}: {', '.join(PLANS)} write what the CPU writes")


@main.command()
@DEVICE
@click.option("--layers", default=4)
@click.option("--cuda-attention", default="attention", help="As for pass-export.")
@click.option("--rows", multiple=True, type=click.IntRange(1), default=(1, 5, 25))
@click.option("--capacity", "capacities", multiple=True, type=int, default=(512, 2048, 8192))
@KEEP
@OUTPUT
@one_line_errors
def layers(
    device: str, layers: int, cuda_attention: str, keep: Path, output: Path | None, **given: Any
) -> None:
    """Time passes of layers of a random 7B model by rows and KV capacity, and save logits."""
    sizes = {"layers": layers, **SIZES_OF_7B}
    place = keep / "-".join(map(str, sizes.values()))
    bundle = make_bundle(place, device, sizes, dtype="fp16", cuda_attention=cuda_attention)
    with load(bundle, device, max_batch_size=1, prefix_cache=False) as session:
        logits = token_scores(session, list(range(3, 40)), GenerateOptions(1))
        cells = []
        for capacity in given["capacities"]:
            cells += time_rows(session, given["rows"], capacity, sizes)
        report = {"cells": cells, "uncaptured": session.backend.uncaptured}
    write_json(report | {"logits": logits[:SAVED_LOGITS].tolist()}, output)


@main.command()
@BUNDLE
@DEVICE
@OUTPUT
@one_line_errors
def kernels(bundle: Path, device: str, output: Path | None) -> None:
    """Time the kernels of passes of BUNDLE by name."""
    if why := why_no_profiler():
        raise PassError(why)
    with load(bundle, device, max_batch_size=1) as session:
        write_json(time_kernels(session), output)


@main.command()
@BUNDLE
@DEVICE
@click.option("--precision", default="fp16", help="Of the weights: int4, fp16 (CUDA), fp32 (CPU).")
@click.option("--tokens", default=64, help="Length of each answer.")
@KEEP
@OUTPUT
@one_line_errors
def genai(
    bundle: Path, device: str, precision: str, tokens: int, keep: Path, output: Path | None
) -> None:
    """Time onnxruntime-genai, without drafts, with BUNDLE's model and bench's prompts."""
    directory = build_genai(bundle, keep / f"genai-{device}" / precision, device)
    with load(bundle, "cpu") as session:
        prompts = [encode(session, prompt) for prompt in read_prompt_set(FIRST_LOOK_PROMPTS)]
    write, texts = open_genai(directory, 0), []
    for ids in prompts:
        write(ids, tokens, ignore_eos=True)  # to warm up
        texts.append(write(ids, tokens, ignore_eos=True))
    speed = rate(texts)
    times = {"tokens_per_second": speed, "milliseconds_per_pass": 1000 / speed}
    write_json({"plans": [{"plan": f"genai {precision}"} | times]}, output)


if __name__ == "__main__":
    main()
