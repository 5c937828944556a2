"""Chooses the engine set of a bundle that fits this machine, from the manifest, before anything is allocated.

All engines of one session share the library, the device, scratch memory, and what the library says. The kernels that
TensorRT-RTX compiled for a GPU are kept beside the engines for the next process.

TensorRT-RTX compiles kernels for the shapes of a context when it runs first. By default it does so in the background,
runs a slower kernel meanwhile, and then takes the new one, of which a captured graph knows nothing. Contexts made here
compile before they run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pass_runtime.backends.cuda import Cuda, DeviceInfo
from pass_runtime.backends.trt.library import Library, make_logger
from pass_runtime.bundle.integrity import Remembered, has_hash
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole


class RuntimeCache:
    """One for all engines of a set, which lives as long as their contexts. Where its file cannot be read or written,
    kernels are compiled again, and nothing else is different."""

    def __init__(self, library: Any, path: Path) -> None:
        self._library, self._path = library, path
        self._cache: Any = None
        self._saved = b""

    def config(self, engine: Any) -> Any:
        """What contexts of `engine` are made with."""
        library, config = self._library, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(library.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.dynamic_shapes_kernel_specialization_strategy = library.DynamicShapesKernelSpecializationStrategy.EAGER
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        if not config.set_runtime_cache(self._cache):
            log.warning("kernels are compiled again in every process: the library takes no cache of them")
        return config

    def _load(self) -> None:
        try:
            self._saved = self._path.read_bytes()
        except OSError:
            return
        # One of another GPU, driver or version is refused, and replaced later.
        if not self._cache.deserialize(self._saved):
            self._saved = b""

    def save(self) -> None:
        """Keep the kernels that were compiled since the last time, where there are any."""
        if self._cache is None:
            return
        found = bytes(self._cache.serialize())
        if found == self._saved:
            return
        try:
            write_whole(self._path, found)
            self._saved = found
        except PassError as error:
            log.info("compiled kernels are not kept for the next process: %s", error)

    def close(self) -> None:
        """Let go of it, after all contexts."""
        self._cache = None


log = logging.getLogger("pass_runtime.backends")
MAX_KEPT_ERRORS = 4
"""How many of the library's last errors a message repeats."""


@dataclass
class Scratch:
    """Device memory for activations. All contexts of all engines share it, because only one of them runs at a time.

    Where an engine needs more than those before it, it gets a new block; contexts and graphs that refer to an older one
    go on using that.
    """

    cuda: Cuda
    size: int = 0
    address: int = 0

    def reserve(self, size: int) -> tuple[int, int]:
        """The address and the size of a block of at least `size` bytes."""
        if size > self.size or not self.address:
            self.address, self.size = self.cuda.allocate(size), size
        return self.address, self.size


@dataclass
class Shared:
    """library: the TensorRT module. cache: of the kernels that it compiles at run time, None where it compiles none."""

    library: Any
    cuda: Cuda
    cache: RuntimeCache | None
    scratch: Scratch = field(init=False)
    runtime: Any = field(init=False)
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_ERRORS))

    def __post_init__(self) -> None:
        self.scratch = Scratch(self.cuda)
        self._logger = make_logger(self.library, self._errors, log)
        self.runtime = self.library.Runtime(self._logger)

    def save_kernels(self) -> None:
        """Keep what was compiled until now for the next process, where the library compiles at run time."""
        if self.cache is not None:
            self.cache.save()

    def clear_errors(self) -> None:
        """Forget what the library said until now, so that `reason` tells of what comes."""
        self._errors.clear()

    def reason(self) -> str:
        """Why the call that just failed did: what the library said of it, and the CUDA error; DeviceLost where the
        device is lost."""
        met = self.cuda.why()
        said = [*dict.fromkeys(self._errors), *([met] if met else [])]
        self._errors.clear()
        return "; ".join(said)[:600] or "it gave no reason"


OUTDATED = "were built from other graphs than the bundle has now"


def choose_engines(
    bundle: Path,
    manifest: Manifest,
    library: Library,
    version: str,
    device: DeviceInfo | None,
    verify: bool = True,
    *,
    why_absent: str = "",
) -> EngineSet:
    """The newest set of `library` for this `version` and GPU; PassError says why none fits. verify: check hashes.
    why_absent: why there is no `device`, for the message."""
    check_built(bundle, manifest, library)
    if device is None:
        why = f" ({why_absent})" if why_absent else ""
        raise PassError(f"{library.name} needs an NVIDIA GPU, and none is visible{why}; use --device cpu")
    candidates = [engines for engines in manifest.engines if engines.library == library.name]
    fitting = [engines for engines in candidates if fits(engines, manifest, version, device)]
    if not fitting:
        reason = why_not(candidates[-1], manifest, version, device)
        raise PassError(f"the {library.name} engines in {bundle} {reason}; {_command(bundle, library)}")
    remembered = Remembered()
    verify_engines(bundle, fitting[-1], hashes=verify, remembered=remembered)
    remembered.save()
    return fitting[-1]


def check_built(bundle: Path, manifest: Manifest, library: Library) -> None:
    """PassError where no machine can run engines of `library`: the bundle has none, or none of its present graphs."""
    candidates = [engines for engines in manifest.engines if engines.library == library.name]
    if not candidates:
        raise PassError(f"{bundle} has no {library.name} engines; {_command(bundle, library)}")
    if not any(is_current(engines, manifest) for engines in candidates):
        raise PassError(f"the {library.name} engines in {bundle} {OUTDATED}; {_command(bundle, library)}")


def _command(bundle: Path, library: Library) -> str:
    return f"run: pass-export build {bundle} --engine {library.name}"


def is_current(engines: EngineSet, manifest: Manifest) -> bool:
    """Whether `engines` were built from the graphs that the bundle has."""
    return engines.bundle == manifest.content


def why_not(engines: EngineSet, manifest: Manifest, version: str, device: DeviceInfo) -> str | None:
    """The reason why `engines` cannot run here, as words for a message; None where they can."""
    if not is_current(engines, manifest):
        return OUTDATED
    if engines.version != version:
        return f"were built by version {engines.version}, and {version} is installed"
    if device.target not in engines.targets:
        return f"are for {_listed(engines.targets)}, and this GPU ({device.name}) is {device.target}"
    return None


def fits(engines: EngineSet, manifest: Manifest, version: str, device: DeviceInfo) -> bool:
    """Whether `engines` can run with this library version on this GPU."""
    return why_not(engines, manifest, version, device) is None


def _listed(targets: Sequence[str]) -> str:
    return ", ".join(targets)


def verify_engines(bundle: Path, engines: EngineSet, *, hashes: bool, remembered: Remembered | None = None) -> None:
    """Check that every engine of a set exists and is the one that was built; `remembered` as for `verify_files`."""
    for engine in engines.engines:
        path = engines.path(bundle) / engine.file
        if not path.is_file():
            raise PassError(f"{path} is missing; run: pass-export build {bundle} --engine {engines.library}")
        size = path.stat().st_size
        if size != engine.bytes or (hashes and not has_hash(path, engine.sha256, remembered)):
            raise PassError(
                f"{path} is not the file that was built ({size} bytes, {engine.bytes} listed); "
                f"run: pass-export build {bundle} --engine {engines.library} --force"
            )
