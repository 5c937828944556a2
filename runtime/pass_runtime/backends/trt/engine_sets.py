"""Chooses the engine set of a bundle that fits this machine, from the manifest, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pass_runtime.backends.cuda import DeviceInfo
from pass_runtime.backends.trt.library import Library
from pass_runtime.bundle.integrity import has_hash
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.bundle.remembered import Remembered
from pass_runtime.errors import PassError

OUTDATED = "were built from other graphs than the bundle has now"


def choose_engines(
    bundle: Path,
    manifest: Manifest,
    library: Library,
    version: str,
    device: DeviceInfo | None,
    verify: bool = True,
    *,
    absent: str = "",
) -> EngineSet:
    """The newest set of `library` for this `version` and GPU; PassError says why none fits. verify: check hashes.
    absent: why there is no `device`, for the message."""
    check_built(bundle, manifest, library)
    if device is None:
        why = f" ({absent})" if absent else ""
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
