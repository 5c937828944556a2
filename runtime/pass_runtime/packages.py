"""Says which package of ONNX Runtime is installed, and with which command to install the right one.

onnxruntime and onnxruntime-gpu hold different builds of the same files. With both, the files are
those of the package that pip wrote last, and removing either breaks the other. So an environment
should have one of them: the project's extras cpu and gpu bring one each, and no other part of the
project depends on either.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("onnxruntime", "onnxruntime-gpu")
INSTALL = "pip install 'pass-toolkit[cpu]', or for an NVIDIA GPU: pip install 'pass-toolkit[gpu]'"
INSTALL_GPU_BUILD = (
    "pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"
)
MISSING_MESSAGE = f"onnxruntime is not installed; run: {INSTALL}"


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
