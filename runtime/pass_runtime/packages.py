"""Says which packages are missing, and with which command to install them.

The packages of an extra are those in the project's own metadata.

onnxruntime and onnxruntime-gpu hold different builds of the same files. With both, the files are
those of the package that pip wrote last, and removing either breaks the other. So an environment
should have one of them: the project's extras cpu and gpu bring one each, and no other part of the
project depends on either.
"""

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
"""A requirement of an extra, in a package's metadata."""
MODULES = {
    "cuda-python": "cuda",
    "onnxruntime-gpu": "onnxruntime",
    "tensorrt-cu13": "tensorrt",
    "tensorrt-rtx-cu13": "tensorrt_rtx",
}
"""The modules of packages with other names."""
PACKAGES = ("onnxruntime", "onnxruntime-gpu")
INSTALL_GPU_BUILD = (
    "pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"
)


def not_installed(package: str, *extras: str) -> PassError:
    """Return the error about a missing package, with the command that installs these extras. "cpu"
    is any build of ONNX Runtime."""
    command = f"pip install '{PROJECT}[{','.join(extras)}]'"
    if "cpu" in extras:
        command += f", or for an NVIDIA GPU: {command.replace('cpu', 'gpu')}"
    return PassError(f"{package} is not installed; run: {command}")


def missing(extra: str) -> Sequence[str]:
    """Return the packages of `extra` that have no module here."""
    with suppress(PackageNotFoundError):
        found = map(REQUIREMENT.fullmatch, requires(PROJECT) or ())
        names = [match[1] for match in found if match is not None and match[2] == extra]
        return [name for name in names if not _has(MODULES.get(name, name.replace("-", "_")))]
    return ()  # The project is not installed, but run in place.


def _has(module: str) -> bool:
    return sys.modules.get(module) is not None or find_spec(module) is not None


def installed() -> dict[str, str]:
    """Return the packages of PACKAGES that are installed: name -> version."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def why_no_cuda() -> str:
    """Return why this onnxruntime has no CUDAExecutionProvider, and the command that mends it."""
    if len(installed()) == len(PACKAGES):
        both = " and ".join(PACKAGES)
        return f"{both} are both installed, and share files; run: {INSTALL_GPU_BUILD}"
    return f"this onnxruntime has no CUDAExecutionProvider; run: {INSTALL_GPU_BUILD}"
