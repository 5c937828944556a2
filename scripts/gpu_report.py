"""The report of scripts/gpu_check.py: the GPU and its libraries, the results of steps as tables,
and the verdict."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import shutil
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_figures import compared, figures
from gpu_kernels import why_no_profiler

from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.backends.trt.library import LIBRARIES, import_library
from pass_runtime.cli.bench import write_json
from pass_runtime.errors import PassError
from pass_runtime.files import read_text, write_whole
from pass_runtime.packages import why_no_cuda

SMI_FIELDS = (
    "name,driver_version,memory.total,power.limit,compute_cap,"
    "clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem"
)
NOTHING: Mapping[str, float] = MappingProxyType({})
PACKAGES = "torch|triton|transformers|onnxruntime.*|tensorrt.*|cuda.bindings|numpy"
BENCH_FIELDS = (
    "plan",
    "tokens_per_second",
    "ratio",
    "milliseconds_per_pass",
    "host_milliseconds_per_pass",
    "tau",
)
TABLES = {
    "device": ("checks", ("check", "result")),
    "tiny": ("plans", ("plan", "same_tokens", "captured")),
    "layers": (
        "cells",
        ("window", "rows", "capacity", "milliseconds", "ratio", "of the bound", "7B, extrapolated"),
    ),
    "rows": (
        "rows",
        ("window", "rows", "lookahead_rows", "trunk_milliseconds", "tail_milliseconds"),
    ),
    "batch": ("plans", ("plan", "batch", *BENCH_FIELDS[1:])),
    "bench": ("plans", BENCH_FIELDS),
    "kernels": ("kernels", ("plan", "kernel", "launches", "microseconds")),
    "genai": ("plans", ("plan", "tokens_per_second", "milliseconds_per_pass")),
    "cpp": ("plans", BENCH_FIELDS),
}
"""By the first word of a step's name: the list in its JSON that is shown, and its fields."""
TABLES["attention"] = TABLES["layers"]
ASIDE = ("attention", "kernels", "genai")
"""Steps whose failure says nothing against the toolkit: a choice, a profiler, another engine."""
GPU_STEPS = (*(name for name in TABLES if name != "genai"), "tests")
"""Steps that run the toolkit on the GPU, by the first word of their names."""
VERDICTS = {"works": 0, "wrong": 1, "nothing ran": 3, "works but not captured": 4}
"""Verdicts and their exit statuses."""
LAYERS_OF_7B = 32
PLAIN_FLAG = "--cuda-attention attention"
MAX_LOGIT_DIFFERENCE, MAX_TIME_RATIO = 3e-2, 0.98
"""Limits for advising another attention operator: the difference of its fp16 logits, relative to
the largest logit, and its time, relative to the time of the default operator. A larger ratio of
times may be noise."""


@dataclass(frozen=True)
class Machine:
    """The GPU and its libraries.

    gpu: nvidia-smi's fields of GPU 0; empty without a GPU. target: such as `sm90`. memory: GiB.
    versions: of installed packages.
    missing: the reasons why some of cuda (ONNX Runtime), tensorrt, tensorrt-rtx, cuda-python,
    profiler and genai cannot be used, by name. If there is no GPU, the only key is gpu.
    """

    gpu: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    memory: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a step. status: ok, failed or skipped. data: the JSON that it wrote."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    data: Any = None


def inspect_machine() -> Machine:
    """Run `find_machine` in another process, so that it uses no GPU memory later."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find_machine).result()


def find_machine() -> Machine:
    gpu, device = nvidia_smi(), find_device()
    if not gpu and device is None:
        smi = "shows none" if shutil.which("nvidia-smi") else "is not installed"
        return Machine(missing={"gpu": f"nvidia-smi {smi}; {why_no_device()}"})
    gpu = gpu or {"name": device.name, "memory.total": f"{device.total >> 20} MiB"}
    target = device.target if device else "sm" + gpu["compute_cap"].replace(".", "")
    missing = {"cuda": why_not("cuda"), "cuda-python": "" if device else why_no_device()}
    missing |= {"profiler": why_no_profiler(), "genai": why_no_genai()}
    for name, library in LIBRARIES.items():
        if unknown := library.unknown_target([target]):
            missing[name] = unknown
        else:
            missing[name] = missing["cuda-python"] or why_not(name)
    installed = dict(
        sorted(
            (d.name, d.version)
            for d in distributions()
            if re.fullmatch(PACKAGES, d.name or "", re.I)
        )
    )
    memory = device.total / 2**30 if device else float(gpu["memory.total"].split()[0]) / 1024
    return Machine(
        gpu, target, memory, installed, {name: why for name, why in missing.items() if why}
    )


def nvidia_smi() -> dict[str, str]:
    """Return SMI_FIELDS of GPU 0, or {} if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
        return dict(zip(SMI_FIELDS.split(","), map(str.strip, answer.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def why_not(name: str) -> str:
    """Return the reason why a library cannot be used, or ""."""
    try:
        if name in LIBRARIES:
            import_library(LIBRARIES[name])
        elif (
            "CUDAExecutionProvider"
            not in importlib.import_module("onnxruntime").get_available_providers()
        ):
            return why_no_cuda()
    except Exception as error:  # an incomplete installation can raise any error
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def why_no_genai() -> str:
    """Return the reason why onnxruntime-genai cannot be measured on the GPU, or ""."""
    install = "run: pip install onnxruntime-genai-cuda"
    try:
        genai = importlib.import_module("onnxruntime_genai")
    except Exception as error:  # without CUDA's libraries any error
        return f"onnxruntime-genai cannot be imported ({' '.join(str(error).split())}); {install}"
    return (
        ""
        if genai.is_cuda_available()
        else f"this onnxruntime-genai has no CUDA; uninstall it, and {install}"
    )


def verdict(machine: Machine, results: Sequence[Result]) -> tuple[str, str]:
    """Return one of VERDICTS, and its reason."""
    failed = [
        result
        for result in results
        if result.status == "failed" and not result.name.startswith(ASIDE)
    ]
    more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
    if failed:
        return "wrong", f"{failed[0].name} failed: {failed[0].reason}{more}"
    ran = [
        result
        for result in results
        if result.status == "ok" and result.name.split()[0] in GPU_STEPS
    ]
    if not ran and not machine.gpu:
        return "nothing ran", f"no NVIDIA GPU: {machine.missing['gpu']}"
    skipped = [result.reason for result in results if result.status == "skipped"]
    if not ran:
        return "nothing ran", skipped[0] if skipped else "no step was chosen"
    for result in ran:
        for name, why in (result.data or {}).get("uncaptured", {}).items():
            return "works but not captured", f"{result.name}: {name}: {why}"
    return "works", f"{len(ran)} steps on the GPU" + (
        f", {len(skipped)} skipped" if skipped else ""
    )


def tables(
    machine: Machine, results: Sequence[Result], before: Mapping[str, float] = NOTHING
) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table of the report by its title: the machine, the steps, the figures
    to compare, and all measurements. before: figures of an earlier report."""
    unusable = {name: f"not usable: {why}" for name, why in machine.missing.items()}
    facts = {**machine.gpu, **machine.versions, **unusable}
    shown = {
        "GPU and libraries": [{"": name, "as found": value} for name, value in facts.items()],
        "steps": [],
    }
    data = {step.name: step.data for step in results if step.data}
    bandwidth = data.get("device", {}).get("copy_bandwidth")
    for step in results:
        reason = (
            attention_advice(step, data.get("layers cuda"))
            if step.name.startswith("attention")
            else step.reason
        )
        row = {
            "step": step.name,
            "status": step.status,
            "seconds": f"{step.seconds:.0f}",
            "reason": reason,
        }
        shown["steps"].append(row)
    if chosen := compared(before, figures(data)):
        shown["figures"] = chosen
    for step in results:
        entries, keys = TABLES.get(step.name.split()[0], ("", ()))
        for entry in step.data[entries] if entries and step.data else ():
            line = entry | (_extrapolate(entry, bandwidth) if "layer_bytes" in entry else {})
            shown.setdefault(step.name, []).append(
                {key.replace("_", " "): _cell(line.get(key)) for key in keys}
            )
    return shown


def attention_advice(step: Result, plain: Any) -> str:
    """Return advice on exporting with PLAIN_FLAG. step: its result. plain: the data with
    PLAIN_FLAG."""
    if step.status != "ok":
        return (
            f"export with {PLAIN_FLAG}: {step.reason}" if step.status == "failed" else step.reason
        )
    if plain is None:
        return f"run the step 'layers cuda' too; its times show if {PLAIN_FLAG} is slower"
    scale = max(map(abs, plain["logits"]))
    difference = (
        max(abs(a - b) for a, b in zip(plain["logits"], step.data["logits"], strict=True)) / scale
    )
    if not difference <= MAX_LOGIT_DIFFERENCE:
        return (
            f"export with {PLAIN_FLAG}: logits differ by up to {difference:.2g} of the "
            "largest logit"
        )
    pairs = zip(step.data["cells"], plain["cells"], strict=True)
    ratio = statistics.mean(new["milliseconds"] / old["milliseconds"] for new, old in pairs)
    advice = "leave out" if ratio < MAX_TIME_RATIO else "export with"
    return f"{advice} {PLAIN_FLAG}: passes take {ratio:.2f} times as long without it"


def _extrapolate(cell: Mapping[str, Any], bandwidth: float | None) -> dict[str, float]:
    """Return two columns for a pass of some layers of the random 7B model.

    "of the bound": the time of copying the bytes that the pass reads, divided by its time. "7B,
    extrapolated": the milliseconds of a pass with all layers, in proportion to the bytes read.
    bandwidth: bytes per second.
    """
    read, whole = (
        cell["other_bytes"] + count * cell["layer_bytes"]
        for count in (cell["layers"], LAYERS_OF_7B)
    )
    bound = {"of the bound": 1e3 * read / bandwidth / cell["milliseconds"]} if bandwidth else {}
    return bound | {"7B, extrapolated": cell["milliseconds"] * whole / read}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value or "-")


def read_figures(report: Path | None) -> Mapping[str, float]:
    """Return the figures in a report.json; none without one. Raises PassError if the file has
    none."""
    if report is None:
        return NOTHING
    try:
        return {
            name: float(value) for name, value in json.loads(read_text(report))["figures"].items()
        }
    except (ValueError, TypeError, LookupError, AttributeError):
        raise PassError(f"{report} is no report.json of this script") from None


def write_report(
    directory: Path,
    bundle: Path,
    machine: Machine,
    results: Sequence[Result],
    before: Mapping[str, float] = NOTHING,
) -> str:
    """Write report.json and report.md atomically. Return report.md. before: see `tables`."""
    name, why = verdict(machine, results)
    report = {"verdict": name, "why": why, "bundle": str(bundle), **asdict(machine)}
    report["figures"] = figures({step.name: step.data for step in results if step.data})
    write_json(
        report | {"steps": [asdict(result) for result in results]}, directory / "report.json"
    )
    text = f"**VERDICT: {name}** ({why})\n\n"
    for title, rows in tables(machine, results, before).items():
        headings = [*rows[0]] if rows else []
        lines = [headings, ["---"] * len(headings), *(row.values() for row in rows)]
        shown = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        text += f"## {title}\n\n" + "".join(f"| {line} |\n" for line in shown) + "\n"
    write_whole(directory / "report.md", text)
    return text
