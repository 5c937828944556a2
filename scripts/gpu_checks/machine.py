"""The GPU and its libraries, and why any of them cannot be used."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import distributions

from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.backends.trt.library import LIBRARIES, import_library

SMI = "name,driver_version,memory.total,power.limit,compute_cap,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem"
PACKAGES = "torch|triton|transformers|onnxruntime.*|tensorrt.*|cuda.bindings|numpy"


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


def look() -> Found:
    """Run `find` in another process, so that the libraries hold no GPU memory while steps are timed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(find).result()


def find() -> Found:
    gpu, device = nvidia_smi(), find_device()
    if not gpu and device is None:
        smi = "shows none" if shutil.which("nvidia-smi") else "is not installed"
        return Found(missing={"gpu": f"nvidia-smi {smi}; {why_no_device()}"})
    gpu = gpu or {"name": device.name, "memory.total": f"{device.total >> 20} MiB"}
    target = device.target if device else "sm" + gpu["compute_cap"].replace(".", "")
    missing = {name: why_not(name) for name in ("cuda", "torch")}
    missing["cuda-python"] = "" if device else why_no_device()
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
