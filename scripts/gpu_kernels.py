"""Times the kernels of a bundle's passes by name (torch's profiler), for scripts/gpu_check.py.

The profiler records all kernels of the process, whoever launched them, through NVIDIA's CUPTI,
which CUDA builds of torch bring. It also sees the kernels inside of captured graphs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pass_runtime import GenerateOptions, PassError, SamplingParams, Session

KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of the profiler's events that occupy the GPU."""
SHOWN_KERNELS, NAME_LENGTH = 20, 70
"""The rest of a pass's kernels are summed up in one row; longer names are cut."""
TOKENS = 64
PROFILED = {
    "ar, greedy": ("ar", SamplingParams()),
    "ar, T=0.8": ("ar", SamplingParams(0.8, seed=1)),
    "fused, greedy": ("fused", SamplingParams()),
    "fused, T=0.8": ("fused", SamplingParams(0.8, seed=1)),
}
Profile = Callable[[Callable[[], int]], tuple[Iterable[Mapping[str, Any]], int]]
"""Runs a function. Returns the events of a Chrome trace (name, cat: category, dur: microseconds),
and its result."""


def why_no_profiler() -> str:
    """Return the reason why kernels cannot be timed, or ""."""
    try:
        from torch.profiler import ProfilerActivity, supported_activities
    except ImportError as error:
        return f"torch's profiler cannot be imported ({error}); install a CUDA build of torch"
    if ProfilerActivity.CUDA not in supported_activities():
        return (
            "this torch has no CUPTI, through which kernels are timed; install a CUDA build "
            "of torch"
        )
    return ""


def profile(work: Callable[[], int]) -> tuple[list[dict[str, Any]], int]:
    """Return a `Profile`, of the GPU's activity only."""
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
    """Return a kernel's name without return type, namespaces, parameters and template arguments,
    but with the argument that tells what a kernel of ONNX Runtime or CUTLASS computes."""
    told = re.search(r"\b(OP_|cutlass_)\w+", name)
    name = name.removeprefix("void ")
    while (shorter := re.sub(r"<[^<>]*>", "", name)) != name:
        name = shorter
    name = (
        re.sub(r"(\(anonymous namespace\)|\w+)::", "", name).partition("(")[0].strip() or "unnamed"
    )
    return (f"{name} {told[0]}" if told and told[0] != name else name)[:NAME_LENGTH]


def kernel_rows(
    plan: str, events: Iterable[Mapping[str, Any]], passes: int
) -> list[dict[str, Any]]:
    """Return a row of all kernels of `passes` passes, then rows by name, the longest first.

    Each row has the number of launches and the microseconds of a pass. Raises PassError if there
    are no kernels.
    """
    found = defaultdict[str, list[float]](list)
    for event in events:
        if event.get("cat") in KINDS:
            found[short_name(event["name"])].append(event["dur"])
    if not found:
        raise PassError(
            "the profiler saw no kernels: CUPTI may not be allowed here, or another profiler "
            "is running"
        )
    kernels = sorted(
        ((name, len(times), sum(times)) for name, times in found.items()), key=lambda each: -each[2]
    )

    def together(name: str, some: Sequence[tuple[str, int, float]]) -> tuple[str, int, float]:
        return name, sum(count for _, count, _ in some), sum(time for _, _, time in some)

    rest = kernels[SHOWN_KERNELS:]
    shown = [together("all", kernels), *kernels[:SHOWN_KERNELS]]
    shown += [together(f"{len(rest)} others", rest)] if rest else []
    return [
        {"plan": plan, "kernel": name, "launches": count / passes, "microseconds": time / passes}
        for name, count, time in shown
    ]


def time_kernels(session: Session, run: Profile = profile) -> dict[str, Any]:
    """Return the kernels of passes of each of PROFILED, as `kernel_rows` has them.

    The prompt is one token, so that nothing but passes of the plan runs; each text is written once
    before, so that everything is captured.
    """
    rows = []
    for name, (plan, sampling) in PROFILED.items():
        options = GenerateOptions(TOKENS, sampling, plan=plan, ignore_eos=True)

        def write(options: GenerateOptions = options) -> int:
            return session.generate_ids([3], options).result().stats.passes

        write()
        events, passes = run(write)
        rows += kernel_rows(name, events, passes)
    return {"kernels": rows, "uncaptured": session.backend.uncaptured}
