"""Chooses the engine set that runs on this machine, and holds what its engines share."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pass_runtime.backends.cuda import Cuda, DeviceInfo
from pass_runtime.backends.trt.library import Library, make_logger
from pass_runtime.bundle.integrity import HashCache, has_hash
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

log = logging.getLogger("pass_runtime.backends")


class RuntimeCache:
    """TensorRT-RTX's compiled kernels. It must live as long as their contexts; without its file,
    kernels are compiled again."""

    def __init__(self, library: Any, path: Path) -> None:
        self._library, self._path = library, path
        self._cache: Any = None
        self._saved = b""

    def config(self, engine: Any) -> Any:
        library, config = self._library, engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            library.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        config.dynamic_shapes_kernel_specialization_strategy = (
            library.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._load()
        if not config.set_runtime_cache(self._cache):
            log.warning(
                "the library refuses a cache of kernels, so every process compiles them again"
            )
        return config

    def _load(self) -> None:
        try:
            self._saved = self._path.read_bytes()
        except OSError:
            return
        # The library refuses files of another GPU, driver or version; `save` then replaces them.
        if not self._cache.deserialize(self._saved):
            self._saved = b""

    def save(self) -> None:
        """Write the file if kernels were compiled since."""
        if self._cache is None:
            return
        kernels = bytes(self._cache.serialize())
        if kernels == self._saved:
            return
        try:
            write_whole(self._path, kernels)
            self._saved = kernels
        except PassError as error:
            log.info("compiled kernels are not kept for the next process: %s", error)

    def close(self) -> None:
        """Free the cache, after all contexts."""
        self._cache = None


MAX_KEPT_ERRORS = 4
"""In one error message."""


@dataclass
class Shared:
    """library: the TensorRT module. compiled_kernels: None if the library compiles none at run
    time."""

    library: Any
    cuda: Cuda
    compiled_kernels: RuntimeCache | None
    _scratch: tuple[int, int] = (0, 0)  # address and size
    runtime: Any = field(init=False)
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_KEPT_ERRORS))

    def __post_init__(self) -> None:
        self._logger = make_logger(self.library, self._errors, log)
        self.runtime = self.library.Runtime(self._logger)

    def scratch(self, size: int) -> tuple[int, int]:
        """Return the address and size of a block of at least `size` bytes for activations. All
        contexts share it, as only one runs at a time; older ones keep a block that is too small."""
        if size > self._scratch[1] or not self._scratch[0]:
            self._scratch = self.cuda.allocate(size), size
        return self._scratch

    def save_kernels(self) -> None:
        if self.compiled_kernels is not None:
            self.compiled_kernels.save()

    def clear_errors(self) -> None:
        self._errors.clear()

    def reason(self) -> str:
        """Return the last call's errors in library and CUDA. Raises DeviceLost for a lost GPU."""
        cuda_error = self.cuda.why()
        errors = [*dict.fromkeys(self._errors), *([cuda_error] if cuda_error else [])]
        self._errors.clear()
        return "; ".join(errors)[:600] or "it gave no reason"


OUTDATED = "were built from other graphs than the bundle has now"
"""It follows "the engines"."""


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
    """Return the newest engine set for this `version` of `library` and `device`. Raises
    PassError if there is none, or an engine is not the file that was built."""
    check_built(bundle, manifest, library)
    if device is None:
        cause = f" ({why_absent})" if why_absent else ""
        raise PassError(
            f"{library.name} needs an NVIDIA GPU, and none is visible{cause}; use --device cpu"
        )
    built = [engines for engines in manifest.engines if engines.library == library.name]
    fitting = [engines for engines in built if fits(engines, manifest, version, device)]
    if not fitting:
        reason = why_not(built[-1], manifest, version, device)
        raise PassError(
            f"the {library.name} engines in {bundle} {reason}; {_command(bundle, library)}"
        )
    hash_cache = HashCache()
    verify_engines(bundle, fitting[-1], hashes=verify, hash_cache=hash_cache)
    hash_cache.save()
    return fitting[-1]


def check_built(bundle: Path, manifest: Manifest, library: Library) -> None:
    """Raise PassError unless `library` has engines that were built from the bundle's graphs."""
    built = [engines for engines in manifest.engines if engines.library == library.name]
    if not built:
        raise PassError(f"{bundle} has no {library.name} engines; {_command(bundle, library)}")
    if not any(is_current(engines, manifest) for engines in built):
        raise PassError(
            f"the {library.name} engines in {bundle} {OUTDATED}; {_command(bundle, library)}"
        )


def _command(bundle: Path, library: Library) -> str:
    return f"run: pass-export build {bundle} --engine {library.name}"


def is_current(engines: EngineSet, manifest: Manifest) -> bool:
    return engines.bundle == manifest.content_hash


def why_not(engines: EngineSet, manifest: Manifest, version: str, device: DeviceInfo) -> str | None:
    """Return why `engines` cannot run here, to follow "the engines"; else None."""
    if not is_current(engines, manifest):
        return OUTDATED
    if engines.version != version:
        return f"were built by version {engines.version}, and {version} is installed"
    if device.target not in engines.targets:
        return (
            f"are for {', '.join(engines.targets)}, and this GPU ({device.name}) is {device.target}"
        )
    return None


def fits(engines: EngineSet, manifest: Manifest, version: str, device: DeviceInfo) -> bool:
    return why_not(engines, manifest, version, device) is None


def verify_engines(
    bundle: Path, engines: EngineSet, *, hashes: bool, hash_cache: HashCache | None = None
) -> None:
    """Raise PassError if an engine is missing, or is not the file that was built."""
    for engine in engines.engines:
        path = engines.path(bundle) / engine.file
        if not path.is_file():
            raise PassError(
                f"{path} is missing; run: pass-export build {bundle} --engine {engines.library}"
            )
        size = path.stat().st_size
        if size != engine.bytes or (hashes and not has_hash(path, engine.sha256, hash_cache)):
            raise PassError(
                f"{path} is not the file that was built ({size} bytes, {engine.bytes} listed); "
                f"run: pass-export build {bundle} --engine {engines.library} --force"
            )
