"""What the steps found: tables, report.json and report.md, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from step_time import Shape

from gpu_checks.machine import Found
from gpu_checks.running import Result
from pass_runtime.cli.bench import write_json
from pass_runtime.files import write_whole

BENCH = ("plan", "tokens_per_second", "ratio", "milliseconds_per_pass", "host_milliseconds_per_pass", "tau")
STEP_TIME = ("rows", "capacity", "milliseconds", "ratio", "bound_fraction", "own_cache_milliseconds")
TABLES = {
    "device": ("checks", ("check", "result")),
    "tiny": ("plans", ("plan", "same_tokens", "captured")),
    "layers": ("cells", (*STEP_TIME, "7B, extrapolated")),
    "attention": ("cells", ("rows", "capacity", "attention_milliseconds", "group_query_milliseconds", "ratio")),
    "rows": ("rows", ("window", "rows", "lookahead_rows", "trunk_milliseconds", "tail_milliseconds")),
    "batch": ("plans", ("plan", "batch", *BENCH[1:])),
    "bench": ("plans", BENCH),
    "cpp": ("plans", BENCH),
    "peers": ("peers", ("name", "tokens_per_second", "ratio", "milliseconds_per_pass", "same_tokens")),
    "step-time": ("cells", STEP_TIME),
}
"""The entries of a step's JSON that are shown, and their fields."""
ON_DEVICE = ("device", "tiny", "layers", "attention", "rows", "batch", "bench", "cpp", "tests", "step-time")
"""Steps that show that something works on the GPU."""
VERDICTS = {"works": 0, "wrong": 1, "nothing ran": 3, "works but not captured": 4}
"""With the exit status."""


def verdict(found: Found, results: Sequence[Result]) -> tuple[str, str]:
    """Return one of VERDICTS, and why."""
    failed = [result for result in results if result.status == "failed"]
    if failed:
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        return "wrong", f"{failed[0].name} failed: {failed[0].reason}{more}"
    ran = [result for result in results if result.status == "ok" and result.name.split()[0] in ON_DEVICE]
    if not ran and not found.gpu:
        return "nothing ran", f"no NVIDIA GPU: {found.missing['gpu']}"
    if not ran:
        reasons = list(dict.fromkeys(result.reason for result in results if result.status == "skipped"))
        return "nothing ran", reasons[0] if reasons else "no step was chosen"
    slow = [(result.name, name, why) for result in ran for name, why in _uncaptured(result).items()]
    if slow:
        step, name, why = slow[0]
        return "works but not captured", f"{step}: {name}: {why}"
    skipped = sum(result.status == "skipped" for result in results)
    return "works", f"{len(ran)} steps on the GPU" + (f", {skipped} skipped" if skipped else "")


def _uncaptured(result: Result) -> dict[str, str]:
    """What could not be captured as a CUDA graph, with the reason."""
    found = result.data.get("uncaptured") if isinstance(result.data, dict) else None
    return found or {}


def tables(found: Found, results: Sequence[Result]) -> dict[str, list[dict[str, str]]]:
    """Return the rows of each table by its title: the machine, the steps, and what they measured."""
    facts = {**found.gpu, **found.versions, **{name: f"not usable: {why}" for name, why in found.missing.items()}}
    shown = {"GPU and libraries": [{"": name, "as found": value} for name, value in facts.items()], "steps": []}
    for step in results:
        said = step.reason or (step.data or {}).get("use", "")
        row = {"step": step.name, "status": step.status, "seconds": f"{step.seconds:.0f}", "reason": said}
        shown["steps"].append(row)
        entries, keys = TABLES.get(step.name.split()[0], ("", ()))
        if entries and step.data:
            cells = [_extrapolated(step.data, entry) for entry in step.data[entries]]
            shown[step.name] = [{key.replace("_", " "): _cell(cell.get(key)) for key in keys} for cell in cells]
    return shown


def _extrapolated(data: dict, cell: dict) -> dict:
    """A cell of some layers' step times, with milliseconds for all layers of LLaMA-7B: a pass takes as many times as
    long as it reads more bytes of weights and K/V. Other cells stay as they are."""
    if "shape" not in data or "milliseconds" not in cell:
        return cell
    shape = Shape(**data["shape"])
    whole = replace(shape, num_hidden_layers=Shape().num_hidden_layers)
    read, whole_read = (each.weight_bytes + each.cache_bytes(cell["capacity"]) for each in (shape, whole))
    return cell | {"7B, extrapolated": cell["milliseconds"] * whole_read / read}


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value or "-")


def write_report(directory: Path, bundle: Path, found: Found, results: Sequence[Result]) -> None:
    """Write report.json and report.md, each beside its place and renamed."""
    name, why = verdict(found, results)
    report = {"verdict": name, "why": why, "bundle": str(bundle), **asdict(found)}
    report["steps"] = [asdict(result) for result in results]
    text = f"**VERDICT: {name}** ({why})\n\n"
    for title, rows in tables(found, results).items():
        headings = [*rows[0]] if rows else []
        lines = [headings, ["---"] * len(headings), *(row.values() for row in rows)]
        shown = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
        text += f"## {title}\n\n" + "".join(f"| {line} |\n" for line in shown) + "\n"
    write_json(report, directory / "report.json")
    write_whole(directory / "report.md", text)
