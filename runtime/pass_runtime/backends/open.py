"""Names of devices, and the backend that opens a bundle."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pass_runtime.backends.base import Backend, check_onnx_runtime
from pass_runtime.backends.cuda import find_device, log_level_without_gpu, why_no_device
from pass_runtime.backends.trt.engine_sets import check_built, fits, is_current
from pass_runtime.backends.trt.library import LIBRARIES, Library, import_library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

if TYPE_CHECKING:
    from pass_runtime.options import LoadOptions

GPU_DEVICES = ("cuda", *LIBRARIES)
DEVICES = ("cpu", *GPU_DEVICES, "auto")
DEVICE_HELP = f"{', '.join(DEVICES)}; add the number of a GPU other than the first, as in cuda:1."


def split_device(name: str) -> tuple[str, int]:
    """Return one of DEVICES and the GPU's number among those that this process sees. Raises
    PassError for another name."""
    device, colon, number = name.partition(":")
    if device not in DEVICES:
        raise PassError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    if not colon:
        return device, 0
    if device not in GPU_DEVICES:
        raise PassError(
            f"device {name!r}: {device} takes no number; only {', '.join(GPU_DEVICES)} do, as "
            "in cuda:1"
        )
    if not (number.isascii() and number.isdigit() and len(number) <= 4):
        raise PassError(f"device {name!r}: a GPU's number must follow the colon, as in {device}:1")
    return device, int(number)


log = logging.getLogger("pass_runtime.device")


def gpus_of_replica(name: str) -> int:
    """Return the GPUs that Ray must give a process for `name`. Raises PassError for a numbered
    one: the process sees only Ray's GPUs, so the number could mean another GPU."""
    device, _ = split_device(name)
    if ":" in name:
        raise PassError(f"device {name!r}: Ray chooses the GPU of every replica; use {device}")
    return int(device in GPU_DEVICES)


def open_backend(bundle: Path, manifest: Manifest, options: LoadOptions) -> Backend:
    """Raises PassError if a library, a GPU or the engines are missing."""
    check_load_options(bundle, manifest, options.device, options.capacity)
    device = options.device
    if device == "auto" and (library := find_engine_library(manifest)) is not None:
        device = library.name
    if split_device(device)[0] in LIBRARIES:
        from pass_runtime.backends.trt.backend import TrtBackend

        return TrtBackend(bundle, manifest, replace(options, device=device))
    from pass_runtime.backends.ort.backend import OrtBackend

    return OrtBackend(
        bundle,
        manifest,
        device,
        threads=options.threads,
        max_batch_size=options.max_batch_size,
        capacity=options.capacity,
    )


def check_load_options(bundle: Path, manifest: Manifest, device: str, capacity: int | None) -> None:
    """Raise PassError if no machine could open the bundle so. capacity: in tokens; None is the
    model's."""
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
    """Return a library whose engines in the bundle run on this machine, or None."""
    if not manifest.engines:
        return None
    device = find_device()
    if device is None:
        why = why_no_device()
        log.log(log_level_without_gpu(), "the bundle's engines are not used: %s", why)
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
    try:
        return str(import_library(library).__version__)
    except PassError:
        return None
