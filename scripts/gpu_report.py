"""The report of scripts/gpu_check.py: the GPU and its libraries, tables of what the steps measured,
figures beside those of an earlier run, and the verdict."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
NO_FIGURES: Mapping[str, float] = MappingProxyType({})
PACKAGES = "torch|triton|transformers|onnxruntime.*|tensorrt.*|cuda.bindings|numpy"
"""A regex of the packages whose versions the report lists."""
SPEED_FIELDS = ("tokens_per_second", "ratio", "milliseconds_per_pass")
BENCH_FIELDS = (*SPEED_FIELDS, "host_milliseconds_per_pass", "tau")
ROW_TIMES = ("trunk_milliseconds", "tail_milliseconds")
LAYER_FIELDS = ("milliseconds", "ratio", "of the bound", "7B, extrapolated")
TABLES = {
    "device": ("checks", ("check", "result")),
    "tiny": ("plans", ("plan", "same_tokens", "captured")),
    "layers": ("cells", ("window", "rows", "capacity", *LAYER_FIELDS)),
    "rows": ("rows", ("window", "rows", "lookahead_rows", *ROW_TIMES)),
    "batch": ("plans", ("plan", "batch", *BENCH_FIELDS)),
    "bench": ("plans", ("plan", *BENCH_FIELDS)),
    "kernels": ("kernels", ("plan", "kernel", "launches", "microseconds")),
    "genai": ("plans", ("plan", "tokens_per_second", "milliseconds_per_pass")),
    "cpp": ("plans", ("plan", *BENCH_FIELDS)),
}
"""By the first word of a step's name: the list in its JSON that is shown, and the fields shown."""
TABLES["attention"] = TABLES["layers"]
ASIDE = ("attention", "kernels", "genai")
"""First words of steps whose failure says nothing against the toolkit: they try another attention
operator, need a profiler, or time another engine."""
GPU_STEPS = (*(name for name in TABLES if name != "genai"), "tests")
"""First words of the steps that run the toolkit on the GPU."""
VERDICTS = {"works": 0, "wrong": 1, "nothing ran": 3, "works but not captured": 4}
"""The exit status of each verdict."""
LAYERS_OF_7B = 32
PLAIN_FLAG = "--cuda-attention attention"
MAX_LOGIT_DIFFERENCE, MAX_TIME_RATIO = 3e-2, 0.98
"""Limits for advising another attention operator: the difference of its fp16 logits, relative to
the largest logit, and its time, relative to that of the default operator. A larger ratio of times
may be noise."""


class Figure(NamedTuple):
    """Where a figure stands in the JSON of a step: a field of an entry of the list in TABLES.

    wanted: the values that fields of the entry must have. Of `plan`, only the beginning must be
    equal, since the report's names of plans have more words, as in `fused L=4`.
    """

    step: str
    wanted: Mapping[str, Any]
    field: str

    def pick(self, data: Mapping[str, Any]) -> float:
        """Return the figure of the first such entry. Raises LookupError or TypeError if none is.
        data: the JSON of the step."""

        def fits(entry: Mapping[str, Any], name: str, wanted: Any) -> bool:
            value = entry.get(name)
            return str(value).startswith(wanted) if name == "plan" else bool(value == wanted)

        for entry in data[TABLES[self.step.split()[0]][0]]:
            if all(fits(entry, name, value) for name, value in self.wanted.items()):
                return float(entry[self.field])
        raise LookupError(self.wanted)


GREEDY, SAMPLED, ROWS, BATCH = "bench cuda greedy", "bench cuda sampled", "rows cuda", "batch cuda"
FIGURES = {
    "ar, greedy: tokens/s": Figure(GREEDY, {"plan": "ar"}, "tokens_per_second"),
    "ar, greedy: ms a pass": Figure(GREEDY, {"plan": "ar"}, "milliseconds_per_pass"),
    "two-pass, greedy: times ar": Figure(GREEDY, {"plan": "two-pass"}, "ratio"),
    "fused, greedy: times ar": Figure(GREEDY, {"plan": "fused"}, "ratio"),
    "auto (lookahead), greedy: times ar": Figure(GREEDY, {"plan": "auto (lookahead)"}, "ratio"),
    "ar, T=0.8: ms a pass": Figure(SAMPLED, {"plan": "ar"}, "milliseconds_per_pass"),
    "fused, T=0.8: times ar": Figure(SAMPLED, {"plan": "fused"}, "ratio"),
    "trunk, 1 row: ms": Figure(ROWS, {"window": "ar"}, "trunk_milliseconds"),
    "trunk, 5 rows: times 1 row": Figure(ROWS, {"window": "verify-4"}, "ratio"),
    "trunk, 25 rows, 20 of them look-ahead: times 1 row": Figure(
        ROWS, {"window": "fused-4"}, "ratio"
    ),
    "tail of ar, greedy: ms": Figure(ROWS, {"window": "ar"}, "tail_milliseconds"),
    "tail of fused, greedy: ms": Figure(ROWS, {"window": "fused-4"}, "tail_milliseconds"),
    "ar, 8 sequences: times 1": Figure(BATCH, {"plan": "ar x8"}, "ratio"),
    "ar, 32 sequences: times 1": Figure(BATCH, {"plan": "ar x32"}, "ratio"),
    "onnxruntime-genai, greedy: tokens/s": Figure(
        "genai cuda", {"plan": "genai"}, "tokens_per_second"
    ),
}
"""The figures by which runs are compared, by name."""
LAYER_STEPS = {"Attention": "layers cuda", "GroupQueryAttention": "attention cuda"}
for _window, _rows in {"ar": 1, "fused-4": 25}.items():
    for _operator, _step in LAYER_STEPS.items():
        for _capacity in (512, 8192):
            _wanted = {"window": _window, "capacity": _capacity}
            _name = f"layers of a 7B, {_operator}, {_rows} rows at {_capacity}: ms"
            FIGURES[_name] = Figure(_step, _wanted, "milliseconds")
for _plan in ("ar, greedy", "ar, T=0.8", "fused, greedy", "fused, T=0.8"):
    for _field in ("launches", "microseconds"):
        _wanted = {"plan": _plan, "kernel": "all"}
        FIGURES[f"kernels of a pass, {_plan}: {_field}"] = Figure("kernels cuda", _wanted, _field)


@dataclass(frozen=True)
class Machine:
    """The GPU and its libraries.

    gpu: nvidia-smi's fields of GPU 0; empty without a GPU. target: the GPU's architecture, such as
    `sm90`. memory: in GiB. versions: of installed packages, by name.
    missing: why a part cannot be used, for each of cuda (ONNX Runtime's provider), tensorrt,
    tensorrt-rtx, cuda-python, profiler and genai that cannot. If there is no GPU, the only key is
    gpu.
    """

    gpu: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    memory: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a step. status: ok, failed or skipped. data: the JSON that the step wrote."""

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""
    data: Any = None


def inspect_machine() -> Machine:
    """Run `find_machine` in a process of its own, which frees the GPU memory that it uses."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find_machine).result()


def find_machine() -> Machine:
    """Return the GPU, the versions of packages, and why parts cannot be used."""
    gpu, device = nvidia_smi(), find_device()
    if not gpu and device is None:
        smi = "shows none" if shutil.which("nvidia-smi") else "is not installed"
        return Machine(missing={"gpu": f"nvidia-smi {smi}; {why_no_device()}"})
    gpu = gpu or {"name": device.name, "memory.total": f"{device.total >> 20} MiB"}
    target = device.target if device else "sm" + gpu["compute_cap"].replace(".", "")
    missing = {"cuda": why_not("cuda"), "cuda-python": "" if device else why_no_device()}
    missing |= {"profiler": why_no_profiler(), "genai": why_no_genai()}
    for name, library in LIBRARIES.items():
        unknown = library.unknown_target([target])
        missing[name] = unknown or missing["cuda-python"] or why_not(name)
    versions = {each.name: each.version for each in distributions()}
    shown = [name for name in versions if re.fullmatch(PACKAGES, name or "", re.I)]
    memory = device.total / 2**30 if device else float(gpu["memory.total"].split()[0]) / 1024
    reasons = {name: why for name, why in missing.items() if why}
    return Machine(gpu, target, memory, {name: versions[name] for name in sorted(shown)}, reasons)


def nvidia_smi() -> dict[str, str]:
    """Return SMI_FIELDS of GPU 0, or {} if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader", "--id=0"]
    try:
        answer = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=30)
        return dict(zip(SMI_FIELDS.split(","), map(str.strip, answer.split(",")), strict=True))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


def why_not(name: str) -> str:
    """Return the reason why a library cannot be used, or "". name: cuda, or one of LIBRARIES."""
    try:
        if name in LIBRARIES:
            import_library(LIBRARIES[name])
            return ""
        providers = importlib.import_module("onnxruntime").get_available_providers()
        return "" if "CUDAExecutionProvider" in providers else why_no_cuda()
    except Exception as error:  # an incomplete installation can raise any error
        return " ".join(str(error).split()) or type(error).__name__


def why_no_genai() -> str:
    """Return the reason why onnxruntime-genai cannot be measured on the GPU, or ""."""
    install = "run: pip install onnxruntime-genai-cuda"
    try:
        genai = importlib.import_module("onnxruntime_genai")
    except Exception as error:  # without CUDA's libraries any error
        return f"onnxruntime-genai cannot be imported ({' '.join(str(error).split())}); {install}"
    without_cuda = f"this onnxruntime-genai has no CUDA; uninstall it, and {install}"
    return "" if genai.is_cuda_available() else without_cuda


def why_no_profiler() -> str:
    """Return the reason why torch's profiler cannot time kernels, or ""."""
    install = "install a CUDA build of torch"
    try:
        from torch.profiler import ProfilerActivity, supported_activities
    except ImportError as error:
        return f"torch's profiler cannot be imported ({error}); {install}"
    if ProfilerActivity.CUDA not in supported_activities():
        return f"this torch has no CUPTI, through which kernels are timed; {install}"
    return ""


def verdict(machine: Machine, results: Sequence[Result]) -> tuple[str, str]:
    """Return one of VERDICTS, and its reason."""
    failed = [
        each for each in results if each.status == "failed" and not each.name.startswith(ASIDE)
    ]
    if failed:
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return "wrong", f"{failed[0].name} failed: {failed[0].reason}{others}"
    ran = [each for each in results if each.status == "ok" and each.name.split()[0] in GPU_STEPS]
    if not ran and not machine.gpu:
        return "nothing ran", f"no NVIDIA GPU: {machine.missing['gpu']}"
    skipped = [each.reason for each in results if each.status == "skipped"]
    if not ran:
        return "nothing ran", skipped[0] if skipped else "no step was chosen"
    for result in ran:
        for name, why in (result.data or {}).get("uncaptured", {}).items():
            return "works but not captured", f"{result.name}: {name}: {why}"
    left_out = f", {len(skipped)} skipped" if skipped else ""
    return "works", f"{len(ran)} steps on the GPU{left_out}"


def figures(results: Iterable[Result]) -> dict[str, float]:
    """Return those of FIGURES that the data of the steps have."""
    data = {result.name: result.data for result in results}
    values = {}
    for name, figure in FIGURES.items():
        try:
            values[name] = figure.pick(data[figure.step])
        except (LookupError, TypeError):  # not run, or not with this plan, or not timed
            continue
    return values


def compared(before: Mapping[str, float], now: Mapping[str, float]) -> list[dict[str, str]]:
    """Return the rows of a table: every figure now, and in an earlier report if there is one."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.4g}"

    rows = []
    for name in FIGURES:
        old, new = before.get(name), now.get(name)
        if old is None and new is None:
            continue
        row = {"figure": name, "now": shown(new)}
        if before:
            ratio = f"{new / old:.2f}" if old and new is not None else "-"
            row = {"figure": name, "before": shown(old), "now": shown(new), "now / before": ratio}
        rows.append(row)
    return rows


def tables(
    machine: Machine, results: Sequence[Result], before: Mapping[str, float] = NO_FIGURES
) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table of the report by its title: the machine, the steps, the figures
    to compare, and all measurements. before: figures of an earlier report."""
    unusable = {name: f"not usable: {why}" for name, why in machine.missing.items()}
    facts = {**machine.gpu, **machine.versions, **unusable}
    data = {step.name: step.data for step in results if step.data}
    rows = {"GPU and libraries": [{"": name, "as found": value} for name, value in facts.items()]}
    rows["steps"] = []
    for step in results:
        is_advice = step.name.startswith("attention")
        reason = attention_advice(step, data.get("layers cuda")) if is_advice else step.reason
        row = {"step": step.name, "status": step.status, "seconds": f"{step.seconds:.0f}"}
        rows["steps"].append(row | {"reason": reason})
    if figure_rows := compared(before, figures(results)):
        rows["figures"] = figure_rows
    bandwidth = data.get("device", {}).get("copy_bandwidth")
    for step in results:
        entries, fields = TABLES.get(step.name.split()[0], ("", ()))
        for entry in step.data[entries] if entries and step.data else ():
            values = entry | (_extrapolate(entry, bandwidth) if "layer_bytes" in entry else {})
            row = {name.replace("_", " "): _cell(values.get(name)) for name in fields}
            rows.setdefault(step.name, []).append(row)
    return rows


def attention_advice(step: Result, plain: Any) -> str:
    """Return advice on exporting with PLAIN_FLAG.

    step: the result of passes without PLAIN_FLAG. plain: the data of passes with it, or None.
    """
    if step.status == "failed":
        return f"export with {PLAIN_FLAG}: {step.reason}"
    if step.status != "ok":
        return step.reason
    if plain is None:
        return f"run the step 'layers cuda' too; its times show if {PLAIN_FLAG} is slower"
    pairs = zip(plain["logits"], step.data["logits"], strict=True)
    difference = max(abs(a - b) for a, b in pairs) / max(map(abs, plain["logits"]))
    if not difference <= MAX_LOGIT_DIFFERENCE:  # also if it is NaN
        share = f"{difference:.2g} of the largest logit"
        return f"export with {PLAIN_FLAG}: logits differ by up to {share}"
    cells = zip(step.data["cells"], plain["cells"], strict=True)
    ratio = statistics.mean(new["milliseconds"] / old["milliseconds"] for new, old in cells)
    advice = "leave out" if ratio < MAX_TIME_RATIO else "export with"
    return f"{advice} {PLAIN_FLAG}: passes take {ratio:.2f} times as long without it"


def _extrapolate(cell: Mapping[str, Any], bandwidth: float | None) -> dict[str, float]:
    """Return two columns for a pass of some layers of the random 7B model.

    "of the bound": the time of copying the bytes that the pass reads, divided by the pass's; left
    out without a bandwidth. "7B, extrapolated": the milliseconds of a pass with all layers, in
    proportion to the bytes read. bandwidth: bytes per second.
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
    """Return the figures in a report.json; none if `report` is None. Raises PassError if the file
    has no figures."""
    if report is None:
        return NO_FIGURES
    try:
        values = json.loads(read_text(report))["figures"]
        return {name: float(value) for name, value in values.items()}
    except (ValueError, TypeError, LookupError, AttributeError):
        raise PassError(f"{report} is no report.json of this script") from None


def write_report(
    directory: Path,
    bundle: Path,
    machine: Machine,
    results: Sequence[Result],
    before: Mapping[str, float] = NO_FIGURES,
) -> str:
    """Write report.json and report.md, each atomically. Return the text of report.md."""
    name, why = verdict(machine, results)
    report = {"verdict": name, "why": why, "bundle": str(bundle), **asdict(machine)}
    report |= {"figures": figures(results), "steps": [asdict(result) for result in results]}
    write_json(report, directory / "report.json")
    text = f"**VERDICT: {name}** ({why})\n\n"
    for title, rows in tables(machine, results, before).items():
        headings = [*rows[0]] if rows else []
        lines = [headings, ["---"] * len(headings), *(row.values() for row in rows)]
        shown = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        text += f"## {title}\n\n" + "".join(f"| {line} |\n" for line in shown) + "\n"
    write_whole(directory / "report.md", text)
    return text
