"""The engine for a device name."""

from __future__ import annotations

from pathlib import Path

from pass_runtime.backends.base import Backend
from pass_runtime.backends.trt.cuda import find_device
from pass_runtime.backends.trt.engine_sets import fits
from pass_runtime.backends.trt.library import FLAVOURS, Flavour, import_library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

DEVICES = ("cpu", "cuda", *FLAVOURS, "auto")


def open_backend(bundle: Path, manifest: Manifest, device: str, threads: int = 0, *, verify: bool = True) -> Backend:
    """`device` is one of DEVICES; PassError tells what is missing."""
    if device == "auto" and (found := find_engines(manifest)) is not None:
        device = found.name
    if device not in DEVICES:
        raise PassError(f"unknown device {device!r}: choose one of {', '.join(DEVICES)}")
    if device in FLAVOURS:
        from pass_runtime.backends.trt.backend import TrtBackend

        return TrtBackend.open(bundle, manifest, FLAVOURS[device], verify=verify)
    from pass_runtime.backends.ort.backend import OrtBackend

    return OrtBackend.open(bundle, manifest, device, threads)


def find_engines(manifest: Manifest) -> Flavour | None:
    """The library whose engines in the bundle fit this machine, None where there is none."""
    device = find_device() if manifest.engines else None
    if device is None:
        return None
    for flavour in FLAVOURS.values():
        sets = [engines for engines in manifest.engines if engines.flavour == flavour.name]
        version = _version(flavour) if sets else None
        if version is not None and any(fits(engines, manifest, version, device) for engines in sets):
            return flavour
    return None


def _version(flavour: Flavour) -> str | None:
    try:
        return str(import_library(flavour).__version__)
    except PassError:
        return None
