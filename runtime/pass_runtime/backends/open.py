"""Opens the backend that a device name (`devices`) and a bundle's manifest ask for."""

from __future__ import annotations

import logging
from pathlib import Path

from pass_runtime.backends.base import Backend, check_onnx_runtime
from pass_runtime.backends.cuda import find_device, has_driver, why_no_device
from pass_runtime.backends.devices import GPU_DEVICES, split_device
from pass_runtime.backends.trt.engine_sets import check_built, fits, is_current
from pass_runtime.backends.trt.library import LIBRARIES, Library, import_library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

log = logging.getLogger("pass_runtime.device")


def gpus_of_replica(name: str) -> int:
    """Return how many GPUs Ray must give to a process that opens the device `name`. Raises
    PassError if `name` has a GPU's number: the process sees only the GPUs that Ray gives it, so the
    number could mean another GPU than the user thinks."""
    device, _ = split_device(name)
    if ":" in name:
        raise PassError(f"device {name!r}: Ray chooses the GPU of every replica; use {device}")
    return int(device in GPU_DEVICES)


def open_backend(
    bundle: Path,
    manifest: Manifest,
    device: str,
    *,
    threads: int = 0,
    max_batch_size: int | None = 1,
    capacity: int | None = None,
    verify: bool = True,
) -> Backend:
    """Open the backend for the device name `device`. The keyword arguments are fields of
    `LoadOptions`. Raises PassError if a library, a GPU or the engines are missing."""
    check_load_options(bundle, manifest, device, capacity)
    if device == "auto" and (library := find_engine_library(manifest)) is not None:
        device = library.name
    kind, ordinal = split_device(device)
    if kind in LIBRARIES:
        from pass_runtime.backends.trt.backend import TrtBackend

        return TrtBackend.open(
            bundle,
            manifest,
            LIBRARIES[kind],
            max_batch_size=max_batch_size,
            capacity=capacity,
            verify=verify,
            ordinal=ordinal,
        )
    from pass_runtime.backends.ort.backend import OrtBackend

    return OrtBackend(
        bundle,
        manifest,
        device,
        threads=threads,
        max_batch_size=max_batch_size,
        capacity=capacity,
    )


def check_load_options(bundle: Path, manifest: Manifest, device: str, capacity: int | None) -> None:
    """Raise PassError if no machine could open the bundle on `device` with the KV capacity
    `capacity` (tokens; None: the model's)."""
    if capacity is not None and capacity > manifest.model.max_capacity:
        limit = manifest.model.max_capacity
        raise PassError(
            f"capacity {capacity} is more than the {limit} tokens of the model; use {limit} or less"
        )
    kind, _ = split_device(device)
    if kind in LIBRARIES:
        check_built(bundle, manifest, LIBRARIES[kind])
    elif device != "auto" or not any(is_current(engines, manifest) for engines in manifest.engines):
        check_onnx_runtime(bundle, manifest)


def find_engine_library(manifest: Manifest) -> Library | None:
    """Return a library whose engines in the bundle run on this machine; None if there is none."""
    if not manifest.engines:
        return None
    device = find_device()
    if device is None:
        # With a driver, the user probably expects that the GPU is used.
        level = logging.WARNING if has_driver() else logging.INFO
        log.log(level, "the bundle's engines are not used: %s", why_no_device())
        return None
    for library in LIBRARIES.values():
        sets = [engines for engines in manifest.engines if engines.library == library.name]
        version = _version(library) if sets else None
        if version is not None and any(
            fits(engines, manifest, version, device) for engines in sets
        ):
            return library
    return None


def _version(library: Library) -> str | None:
    """Return the installed version of `library`; None if it cannot be imported."""
    try:
        return str(import_library(library).__version__)
    except PassError:
        return None
