"""Steps of scripts/gpu_check.py that are not commands of the toolkit.

They check that the device works, compare the text of a tiny model with the CPU's, and time passes
by rows, kernels by name and onnxruntime-genai.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from bench_peers import build_genai, open_genai, rate
from gpu_kernels import time_kernels, why_no_profiler

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

SCRIPTS = Path(__file__).resolve().parent
COPY_BYTES, TIMED_COPY_BYTES, TIMED_COPIES = 1 << 20, 1 << 30, 10
"""Bytes of the copy that is compared; bytes and number of the copies that are timed."""
TINY_SIZES = {
    "layers": 2,
    "hidden": 128,
    "intermediate": 256,
    "heads": 4,
    "kv-heads": 2,
    "vocab": 1024,
    "positions": 256,
}
SIZES_OF_7B = {
    "hidden": 4096,
    "intermediate": 11008,
    "heads": 32,
    "kv-heads": 8,
    "vocab": 32000,
    "positions": 8192,
}
"""Sizes of random models. Those of 7B are LLaMA-7B's, but with 8 KV heads, as in newer models."""
PLANS, TOKENS = ("ar", "two-pass", "fused", "auto"), 40
SAMPLINGS = (SamplingParams(), SamplingParams(0.8, seed=7), SamplingParams(1.0, 50, 0.9, 7))
FP16_BYTES, SAVED_LOGITS = 2, 512
"""Bytes of an fp16 number; the number of logits that are saved."""


def check_device(api: Any) -> dict[str, Any]:
    """Check copies, and their capture in a CUDA graph. Return the checks, what was not captured,
    and the bandwidth.

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
        given = np.random.default_rng(0).integers(0, 256, COPY_BYTES, np.uint8)
        address, pinned = cuda.allocate(COPY_BYTES), cuda.pinned((COPY_BYTES,), np.uint8)
        back = np.zeros_like(given)
        cuda.upload(address, given)
        cuda.download(back, address)
        _compare(back, given, "a copy to the GPU and back")
        checks["copy"] = "unchanged"
        try:
            graph = cuda.capture(lambda: cuda.enqueue_download(pinned, address))
        except PassError as error:
            uncaptured["a copy"] = checks["capture"] = str(error)
        else:
            for replay in range(2):
                cuda.upload(address, np.roll(given, replay))
                cuda.launch(graph)
                cuda.synchronize()
                _compare(pinned, np.roll(given, replay), "a captured copy")
            checks["capture"] = "replayed twice"
        bandwidth = _copy_bandwidth(api, cuda, min(TIMED_COPY_BYTES, device.free // 4))
        checks["copies in GPU memory"] = f"{bandwidth / 1e9:.0f} GB/s"
    finally:
        cuda.close()
    shown = [{"check": name, "result": found} for name, found in checks.items()]
    return {"checks": shown, "uncaptured": uncaptured, "copy_bandwidth": bandwidth}


def _compare(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], what: str) -> None:
    if wrong := int((found != expected).sum()):
        raise PassError(
            f"{what} changed {wrong} of {expected.size} bytes: the GPU or its driver is broken"
        )


def _copy_bandwidth(api: Any, cuda: Cuda, size: int) -> float:
    source, target = cuda.allocate(size), cuda.allocate(size)

    def seconds() -> float:
        started = time.perf_counter()
        for _ in range(TIMED_COPIES):
            unwrap(api.cudaMemcpyAsync(target, source, size, ON_DEVICE, cuda.stream))
        cuda.synchronize()
        return time.perf_counter() - started

    return 2 * size * TIMED_COPIES / min(seconds() for _ in range(3))


def make_bundle(place: Path, device: str, sizes: Mapping[str, int], **options: Any) -> Path:
    """Export a random Llama into `place`, and build engines if `device` needs them.

    An existing bundle or set of engines is reused. options: of ExportConfig.
    """
    from rich.console import Console

    from pass_exporter.config import EngineConfig, ExportConfig
    from pass_exporter.engines.build import build_engines
    from pass_exporter.export import export
    from pass_exporter.terminal import Terminal

    model, bundle = place / "model", place / options.get("cuda_attention", "bundle")
    with Terminal(Console(stderr=True)) as progress:
        if not (bundle / FILE_NAME).is_file():
            flags = [f"--{name}={size}" for name, size in sizes.items()]
            subprocess.run(
                [sys.executable, Path(__file__).with_name("random_llama.py"), model, *flags],
                check=True,
            )
            export(ExportConfig(str(model), lookahead=4, output=bundle, **options), progress)
        if device in LIBRARIES and device not in [
            engines.library for engines in read_manifest(bundle).engines
        ]:
            build_engines(bundle, EngineConfig(device, max_seq_len=sizes["positions"]), progress)
    return bundle


def compare_plans(expected: Session, found: Session) -> dict[str, Any]:
    """Return for every plan if `found` writes what `expected` writes by `ar`, and if it was
    captured."""
    prompt, plans = list(range(3, 30)), []
    for plan in PLANS:
        same = True
        for sampling in SAMPLINGS:
            options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)
            plain = GenerateOptions(TOKENS, sampling, plan="ar", ignore_eos=True)
            texts = (
                run_tokens(expected, prompt, plain).token_ids,
                run_tokens(found, prompt, options).token_ids,
            )
            difference = first_difference(expected, prompt, options, *texts)
            same &= difference is None or difference.is_near_tie
        plans.append({"plan": plan, "same_tokens": same, "captured": not found.backend.uncaptured})
    return {"plans": plans, "uncaptured": found.backend.uncaptured}


def time_rows(
    session: Session, rows: Sequence[int], capacity: int, sizes: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Time the trunk by number of rows, with a KV cache that is full except for the widest window.

    Return its milliseconds, and the bytes that a pass reads for each layer and for the LM head."""
    widest = max(*rows, session.backend.capabilities.least_width)
    request = RowsOptions(SamplingParams(), tuple(rows), cached=capacity - widest)
    key_size, hidden = sizes["hidden"] // sizes["heads"] * sizes["kv-heads"], sizes["hidden"]
    layer = (
        hidden * (2 * hidden + 2 * key_size + 3 * sizes["intermediate"]) + 2 * key_size * capacity
    )
    read = {"layers": sizes["layers"], "layer_bytes": FP16_BYTES * layer, "capacity": capacity}
    read["other_bytes"] = FP16_BYTES * hidden * sizes["vocab"]
    return [
        {name: row[name] for name in ("window", "rows", "ratio")}
        | read
        | {"milliseconds": row["trunk_milliseconds"]}
        for row in measure_rows(session, request, [[3]])["rows"]
    ]


@click.group()
def main() -> None:
    """Run one step of scripts/gpu_check.py."""


OUTPUT = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the results here, as JSON."
)
DEVICE = click.option("--device", default="cuda", show_default=True)
KEEP = click.option(
    "--keep",
    type=click.Path(path_type=Path),
    default=Path("build/gpu"),
    help="Directory for models, which are reused.",
)


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
    wrong = [each["plan"] for each in report["plans"] if not each["same_tokens"]]
    if wrong:
        raise PassError(
            f"{', '.join(wrong)} on {device} write other tokens than the CPU; please report it"
        )
    click.echo(f"{device}: {', '.join(PLANS)} write what the CPU writes")


@main.command()
@DEVICE
@click.option("--layers", default=4, show_default=True)
@click.option(
    "--cuda-attention", default="attention", show_default=True, help="As for pass-export."
)
@click.option(
    "--rows", multiple=True, type=click.IntRange(1), default=(1, 5, 25), show_default=True
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    type=int,
    default=(512, 2048, 8192),
    show_default=True,
)
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
        logits = token_scores(session, list(range(3, 40)), GenerateOptions(1))[
            :SAVED_LOGITS
        ].tolist()
        cells = [
            cell
            for size in given["capacities"]
            for cell in time_rows(session, given["rows"], size, sizes)
        ]
        report = {"cells": cells, "logits": logits, "uncaptured": session.backend.uncaptured}
    write_json(report, output)


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
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
@click.argument("bundle", type=click.Path(path_type=Path))
@DEVICE
@click.option(
    "--precision",
    default="fp16",
    show_default=True,
    help="Of its weights: int4, fp16 (CUDA), fp32 (CPU).",
)
@click.option("--tokens", default=64, show_default=True, help="Length of each answer.")
@KEEP
@OUTPUT
@one_line_errors
def genai(
    bundle: Path, device: str, precision: str, tokens: int, keep: Path, output: Path | None
) -> None:
    """Time onnxruntime-genai, without drafts, with BUNDLE's model and bench's prompts."""
    directory = build_genai(bundle, keep / f"genai-{device}" / precision, device)
    with load(bundle, "cpu", weight_cache=False) as session:
        prompts = [encode(session, prompt) for prompt in read_prompt_set(FIRST_LOOK_PROMPTS)]
    write, times = open_genai(directory, 0), []
    for ids in prompts:
        write(ids, tokens, ignore_eos=True)  # to warm up
        times.append(write(ids, tokens, ignore_eos=True))
    speed = rate(times)
    shown = {
        "plan": f"genai {precision}",
        "tokens_per_second": speed,
        "milliseconds_per_pass": 1000 / speed,
    }
    write_json({"plans": [shown]}, output)


if __name__ == "__main__":
    main()
