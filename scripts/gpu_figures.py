"""The figures by which runs of scripts/gpu_check.py are compared, from the results of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Data = Mapping[str, Any]
"""The JSON that a step wrote."""
Pick = Callable[[Data], float]
GREEDY, SAMPLED = "bench cuda greedy", "bench cuda sampled"
LAYERS = {"Attention": "layers cuda", "GroupQueryAttention": "attention cuda"}


def _entry(entries: str, wanted: Mapping[str, Any], data: Data) -> Data:
    """Return the first entry that has all of these values. Raises LookupError if there is none."""
    for entry in data[entries]:
        if wanted.items() <= entry.items():
            return entry
    raise LookupError(wanted)


def _value(entries: str, field: str, wanted: Mapping[str, Any], data: Data) -> float:
    return float(_entry(entries, wanted, data)[field])


def _of_plan(field: str, name: str, data: Data) -> float:
    """Return a field of the first plan whose name begins with `name`."""
    for plan in data["plans"]:
        if plan["plan"].startswith(name):
            return float(plan[field])
    raise LookupError(name)


def _rows(window: str, field: str) -> Pick:
    return partial(_value, "rows", field, {"window": window})


FIGURES: dict[str, tuple[str, Pick]] = {
    "ar, greedy: tokens/s": (GREEDY, partial(_of_plan, "tokens_per_second", "ar")),
    "ar, greedy: ms a pass": (GREEDY, partial(_of_plan, "milliseconds_per_pass", "ar")),
    "two-pass, greedy: times ar": (GREEDY, partial(_of_plan, "ratio", "two-pass")),
    "fused, greedy: times ar": (GREEDY, partial(_of_plan, "ratio", "fused")),
    "auto (lookahead), greedy: times ar": (GREEDY, partial(_of_plan, "ratio", "auto (lookahead)")),
    "ar, T=0.8: ms a pass": (SAMPLED, partial(_of_plan, "milliseconds_per_pass", "ar")),
    "fused, T=0.8: times ar": (SAMPLED, partial(_of_plan, "ratio", "fused")),
    "trunk, 1 row: ms": ("rows cuda", _rows("ar", "trunk_milliseconds")),
    "trunk, 5 rows: times 1 row": ("rows cuda", _rows("verify-4", "ratio")),
    "trunk, 25 rows, 20 of them look-ahead: times 1 row": ("rows cuda", _rows("fused-4", "ratio")),
    "tail of ar, greedy: ms": ("rows cuda", _rows("ar", "tail_milliseconds")),
    "tail of fused, greedy: ms": ("rows cuda", _rows("fused-4", "tail_milliseconds")),
    "ar, 8 sequences: times 1": (
        "batch cuda",
        partial(_value, "plans", "ratio", {"plan": "ar x8"}),
    ),
    "ar, 32 sequences: times 1": (
        "batch cuda",
        partial(_value, "plans", "ratio", {"plan": "ar x32"}),
    ),
    "onnxruntime-genai, greedy: tokens/s": (
        "genai cuda",
        partial(_of_plan, "tokens_per_second", "genai"),
    ),
}
"""By name: the step, and what to take from its data."""
for _window, _count in {"ar": 1, "fused-4": 25}.items():
    for _name, _step in LAYERS.items():
        for _capacity in (512, 8192):
            _pick = partial(
                _value, "cells", "milliseconds", {"window": _window, "capacity": _capacity}
            )
            FIGURES[f"layers of a 7B, {_name}, {_count} rows at {_capacity}: ms"] = (_step, _pick)
for _kind in ("ar, greedy", "ar, T=0.8", "fused, greedy", "fused, T=0.8"):
    for _field in ("launches", "microseconds"):
        _pick = partial(_value, "kernels", _field, {"plan": _kind, "kernel": "all"})
        FIGURES[f"kernels of a pass, {_kind}: {_field}"] = ("kernels cuda", _pick)


def figures(steps: Mapping[str, Data]) -> dict[str, float]:
    """Return those of FIGURES that the steps' data have. steps: by name of the step."""
    found = {}
    for name, (step, pick) in FIGURES.items():
        try:
            found[name] = pick(steps[step])
        except (
            LookupError,
            TypeError,
        ):  # the step was not run, or not with this plan, or has no such time
            continue
    return found


def compared(before: Mapping[str, float], now: Mapping[str, float]) -> list[dict[str, str]]:
    """Return the rows of a table: every figure, now and in an earlier report if there is one."""
    rows = []
    for name in FIGURES:
        old, new = before.get(name), now.get(name)
        if old is None and new is None:
            continue
        row = {"figure": name}
        if before:
            row["before"] = _shown(old)
        row["now"] = _shown(new)
        if before:
            row["now / before"] = f"{new / old:.2f}" if old and new is not None else "-"
        rows.append(row)
    return rows


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
