"""Which of a bundle's engine sets fits this machine: decided from the manifest, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pass_runtime.backends.cuda import DeviceInfo
from pass_runtime.backends.trt.library import Library
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.errors import PassError


def choose_engines(
    bundle: Path, manifest: Manifest, library: Library, version: str, device: DeviceInfo | None, verify: bool = True
) -> EngineSet:
    """The newest set of `library` for this `version` and GPU; PassError tells why none fits. verify: check hashes."""
    build = f"run: pass-export build {bundle} --engine {library.name}"
    candidates = [engines for engines in manifest.engines if engines.library == library.name]
    if not candidates:
        raise PassError(f"{bundle} has no {library.name} engines; {build}")
    if device is None:
        raise PassError(f"{library.name} needs an NVIDIA GPU, and none is visible; use --device cpu")
    fitting = [engines for engines in candidates if fits(engines, manifest, version, device)]
    if not fitting:
        reason = why_not(candidates[-1], manifest, version, device)
        raise PassError(f"the {library.name} engines in {bundle} {reason}; {build}")
    verify_engines(bundle, fitting[-1], hashes=verify)
    return fitting[-1]


def why_not(engines: EngineSet, manifest: Manifest, version: str, device: DeviceInfo) -> str | None:
    """What keeps `engines` from running, None where nothing does."""
    if engines.bundle != manifest.content:
        return "were built from other graphs than the bundle has now"
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


def verify_engines(bundle: Path, engines: EngineSet, *, hashes: bool) -> None:
    """Check that every engine of a set is there and the one that was built."""
    for engine in engines.engines:
        path = engines.path(bundle) / engine.file
        if not path.is_file():
            raise PassError(f"{path} is missing; run: pass-export build {bundle} --engine {engines.library}")
        size = path.stat().st_size
        if size != engine.bytes or (hashes and file_info(path).sha256 != engine.sha256):
            raise PassError(
                f"{path} is not the file that was built ({size} bytes, {engine.bytes} listed); "
                f"run: pass-export build {bundle} --engine {engines.library} --force"
            )
