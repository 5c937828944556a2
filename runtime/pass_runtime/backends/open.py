"""Opens the backend for a device name.

A name says which of several GPUs it is about: `cuda:1` is `cuda` on GPU 1, `cuda` is on GPU 0.
"""

from __future__ import annotations

import logging
from pathlib import Path

from pass_runtime.backends.base import Backend, check_onnx_runtime
from pass_runtime.backends.cuda import find_device, has_driver, why_no_device
from pass_runtime.backends.trt.engine_sets import check_built, fits, is_current
from pass_runtime.backends.trt.library import LIBRARIES, Library, import_library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

GPU_DEVICES = ("cuda", *LIBRARIES)
DEVICES = ("cpu", *GPU_DEVICES, "auto")
DEVICE_HELP = f"{', '.join(DEVICES)}; a GPU other than the first by its number, as cuda:1."
"""Help for an option that takes a device."""


def split_device(name: str) -> tuple[str, int]:
    """The device of DEVICES in `name`, and the number of the GPU among those that this process sees."""
    device, colon, number = name.partition(":")
    if device not in DEVICES:
        raise PassError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    if not colon:
        return device, 0
    if device not in GPU_DEVICES:
        raise PassError(f"device {name!r}: {device} takes no number; only {', '.join(GPU_DEVICES)} do, as cuda:1")
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise PassError(f"device {name!r}: a GPU's number must follow the colon, as in {device}:1")
    return device, int(number)


def gpus_of_replica(name: str) -> int:
    """How many GPUs Ray must give to a process that opens `name`. It makes only those visible to the process, so a
    number would be of another GPU than the user meant."""
    device, _ = split_device(name)
    if ":" in name:
        raise PassError(f"device {name!r}: Ray chooses the GPU of every replica; use {device}")
    return int(device in GPU_DEVICES)


log = logging.getLogger("pass_runtime.device")


def open_backend(
    bundle: Path,
    manifest: Manifest,
    device: str,
    *,
    threads: int = 0,
    max_batch_size: int | None = 1,
    capacity: int | None = None,
    verify: bool = True,
    weight_cache: bool = False,
) -> Backend:
    """The backend for a device as `split_device` takes it; PassError says what is missing. The other arguments are
    those of `LoadOptions`."""
    check_request(bundle, manifest, device, capacity)
    if device == "auto" and (found := find_engine_library(manifest)) is not None:
        device = found.name
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
    from pass_runtime.backends.ort.packed_weights import WeightCache

    return OrtBackend(
        bundle,
        manifest,
        device,
        threads=threads,
        max_batch_size=max_batch_size,
        capacity=capacity,
        weight_cache=WeightCache() if weight_cache else None,
    )


def check_request(bundle: Path, manifest: Manifest, device: str, capacity: int | None) -> None:
    """PassError for requests that no machine could serve."""
    if capacity is not None and capacity > manifest.model.max_capacity:
        raise PassError(f"capacity {capacity} is more than the {manifest.model.max_capacity} tokens of the model")
    kind, _ = split_device(device)
    if kind in LIBRARIES:
        check_built(bundle, manifest, LIBRARIES[kind])
    elif device != "auto" or not any(is_current(engines, manifest) for engines in manifest.engines):
        check_onnx_runtime(bundle, manifest)


def find_engine_library(manifest: Manifest) -> Library | None:
    """The library whose engines in the bundle fit this machine, None where there is none."""
    if not manifest.engines:
        return None
    device = find_device()
    if device is None:
        # A machine without a driver runs on the CPU as it should; one with a driver was meant to use its GPU.
        level = logging.WARNING if has_driver() else logging.INFO
        log.log(level, "the bundle's engines are not used: %s", why_no_device())
        return None
    for library in LIBRARIES.values():
        sets = [engines for engines in manifest.engines if engines.library == library.name]
        version = _version(library) if sets else None
        if version is not None and any(fits(engines, manifest, version, device) for engines in sets):
            return library
    return None


def _version(library: Library) -> str | None:
    try:
        return str(import_library(library).__version__)
    except PassError:
        return None
