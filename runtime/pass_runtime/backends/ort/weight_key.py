"""The name of a trunk's packed weights: a hash of all that their form depends on."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnxruntime as ort

FORMAT = 1
"""Changes with the content of an entry."""
CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("flags", "Features")
"""The instructions that a CPU has, on x86 and on Arm."""
CPU_FIELDS = {
    *("vendor_id", "cpu family", "model", "model name", "stepping"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision"),
    *FEATURES,
}


def weight_key(graph: str, weights: str) -> str | None:
    """The key of a trunk on this machine, from the hashes of its graph and its weights; None where the CPU is unknown.

    Kernels, and the forms they read, are chosen by the CPU's instructions and by the build of ONNX Runtime; the number
    of threads changes no form.
    """
    cpu = describe_cpu()
    if cpu is None:
        return None
    build = f"{ort.__version__} {ort.get_build_info()}"
    text = f"format {FORMAT}\nonnxruntime {build}\ngraph {graph}\nweights {weights}\n{cpu}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_cpu() -> str | None:
    """What Linux tells of the kinds of cores that this machine has: lines `field: value`, each once, in its order. None
    where it does not tell their instructions."""
    try:
        text = CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines: dict[str, None] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in CPU_FIELDS:
            lines[f"{name.strip()}: {value.strip()}\n"] = None
    return "".join(lines) if any(line.startswith(FEATURES) for line in lines) else None
