"""Which package of ONNX Runtime is installed, and the commands that install the right one.

onnxruntime and onnxruntime-gpu hold different builds of the same files. With both, the files are
those of the package that pip wrote last, and removing either breaks the other. So an environment
should have one of them: the project's extras cpu and gpu bring one each, and no other part of the
project depends on either.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("onnxruntime", "onnxruntime-gpu")
INSTALL = "pip install 'pass-toolkit[cpu]', or for an NVIDIA GPU: pip install 'pass-toolkit[gpu]'"
INSTALL_GPU_BUILD = (
    "pip uninstall --yes onnxruntime onnxruntime-gpu && pip install 'pass-toolkit[gpu]'"
)
MISSING = f"onnxruntime is not installed; run: {INSTALL}"


def installed() -> dict[str, str]:
    """The versions of those of PACKAGES that are installed, by name."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def why_no_cuda() -> str:
    """Why an onnxruntime has no CUDAExecutionProvider, and the command that installs one that has
    it."""
    if len(installed()) == len(PACKAGES):
        both = " and ".join(PACKAGES)
        return f"{both} are both installed, and share files; run: {INSTALL_GPU_BUILD}"
    return f"this onnxruntime has no CUDAExecutionProvider; run: {INSTALL_GPU_BUILD}"
