"""Missing packages, and how to install them. onnxruntime and onnxruntime-gpu share files, and
removing one breaks the other: the extras cpu and gpu bring one each."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec

from pass_runtime.errors import PassError

PROJECT = "pass-toolkit"
REQUIREMENT = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"].*")
MODULES = {
    "cuda-python": "cuda",
    "onnxruntime-gpu": "onnxruntime",
    "tensorrt-cu13": "tensorrt",
    "tensorrt-rtx-cu13": "tensorrt_rtx",
}
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
INSTALL_GPU_BUILD = (
    "pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"
)


def not_installed(package: str, *extras: str) -> PassError:
    """extras: what to install."""
    command = f"pip install '{PROJECT}[{','.join(extras)}]'"
    if "cpu" in extras:
        command += f", or for an NVIDIA GPU: {command.replace('cpu', 'gpu')}"
    return PassError(f"{package} is not installed; run: {command}")


def missing(extra: str) -> Sequence[str]:
    """Return the packages of an extra that have no module here."""
    with suppress(PackageNotFoundError):
        found = map(REQUIREMENT.fullmatch, requires(PROJECT) or ())
        names = [match[1] for match in found if match is not None and match[2] == extra]
        return [name for name in names if not _has(MODULES.get(name, name.replace("-", "_")))]
    return ()  # not installed


def _has(module: str) -> bool:
    return sys.modules.get(module) is not None or find_spec(module) is not None


def installed() -> dict[str, str]:
    """Return the installed packages of ONNX Runtime, with versions."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def why_no_cuda() -> str:
    if len(installed()) == len(PACKAGES):
        both = " and ".join(PACKAGES)
        return f"{both} are both installed, and share files; run: {INSTALL_GPU_BUILD}"
    return f"this onnxruntime has no CUDAExecutionProvider; run: {INSTALL_GPU_BUILD}"
