"""TensorRT and TensorRT-RTX, which have the same API."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any, Literal

from pass_runtime.errors import PassError

LibraryName = Literal["tensorrt", "tensorrt-rtx"]


@dataclass(frozen=True)
class Library:
    """module: the Python module. minimum: the oldest version with a KV cache update layer.

    builds_ahead: without a GPU, and for other GPUs. targets: as in `sm89`; () is the present
    GPU's. least_width: rows of the narrowest window. TensorRT-RTX 1.7 has another layout of
    weights for one row, so an engine with a one-row profile beside others holds them twice
    (SmolLM2 fp16: 515 MB, not 304). timing_cache: TensorRT-RTX times nothing while it builds.
    compiles_kernels: whether it compiles and allocates while an engine runs; a captured graph
    cannot.
    """

    name: LibraryName
    module: str
    minimum: tuple[int, int]
    install: str
    builds_ahead: bool
    targets: tuple[str, ...]
    least_width: int
    timing_cache: bool
    compiles_kernels: bool

    def unknown_target(self, wanted: Iterable[str]) -> str:
        """Return a message about the first target that the library does not build for; else ""."""
        unknown = sorted(set(wanted) - set(self.targets)) if self.targets else []
        if not unknown:
            return ""
        # TensorRT-RTX builds on Hopper GPUs, but refuses to load the engine.
        hint = "; it refuses these GPUs (Hopper): use tensorrt, or ONNX Runtime (--device cuda)"
        ending = hint if unknown[0] == HOPPER else ""
        return f"{self.name} has no target {unknown[0]}; it has {', '.join(self.targets)}{ending}"


HOPPER = "sm90"
LIBRARIES: Mapping[str, Library] = {
    "tensorrt": Library(
        name="tensorrt",
        module="tensorrt",
        minimum=(10, 15),
        install="pip install 'pass-toolkit[tensorrt]'",
        builds_ahead=False,
        targets=(),
        least_width=1,
        timing_cache=True,
        compiles_kernels=False,
    ),
    "tensorrt-rtx": Library(
        name="tensorrt-rtx",
        module="tensorrt_rtx",
        minimum=(1, 5),
        install="pip install 'pass-toolkit[tensorrt-rtx]'",
        builds_ahead=True,
        targets=("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
        least_width=2,
        timing_cache=False,
        compiles_kernels=True,
    ),
}


def find_library(name: str) -> Library:
    """Raises PassError for another name."""
    if name not in LIBRARIES:
        raise PassError(f"unknown engine {name!r}: choose one of {', '.join(LIBRARIES)}")
    return LIBRARIES[name]


def import_library(chosen: Library) -> Any:
    """Raises PassError if the module is missing or too old."""
    try:
        library = importlib.import_module(chosen.module)
    except ImportError as error:
        raise PassError(
            f"{chosen.name} cannot be imported ({error}); run: {chosen.install}"
        ) from None
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if version < chosen.minimum:
        needed = ".".join(map(str, chosen.minimum))
        raise PassError(
            f"{chosen.name} {library.__version__} is older than {needed}, the first with a KV "
            f"cache layer; run: {chosen.install}"
        )
    return library


def make_logger(
    library: Any, errors: MutableSequence[str], log: logging.Logger | None = None
) -> Any:
    """Return a logger that adds errors to `errors`, and logs them as warnings."""
    severity_of = library.ILogger
    levels = {
        severity_of.INTERNAL_ERROR: logging.ERROR,
        severity_of.ERROR: logging.ERROR,
        severity_of.WARNING: logging.WARNING,
    }

    class Logger(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            level, line = levels.get(severity), " ".join(message.split())
            if level == logging.ERROR:
                errors.append(line)
            if level is not None and log is not None:
                log.log(level, "%s: %s", library.__name__, line)

    return Logger()
