"""Chooses the targets of an engine build: GPUs, the cache's capacity, and widths of prefill."""

from __future__ import annotations

from collections.abc import Sequence

from pass_exporter.config import EngineConfig
from pass_exporter.engines.profiles import prefill_widths, widest
from pass_runtime.backends.cuda import DeviceInfo, why_no_device
from pass_runtime.backends.trt.library import Library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

DEFAULT_SEQ_LEN = 4096
CAPACITY_MULTIPLE = 64
"""Capacities are multiples of this many columns, because attention kernels read that many or a divisor at a time."""


def choose_targets(chosen: Library, config: EngineConfig, device: DeviceInfo | None) -> tuple[str, ...]:
    """Return the compute capabilities to build for, such as `sm89`. Users may write 8.9, 89 or sm89."""
    requested = tuple(f"sm{name.lower().removeprefix('sm').replace('.', '')}" for name in config.compute_capability)
    if not chosen.builds_ahead:
        if device is None:
            raise PassError(
                f"{chosen.name} builds for the GPU at hand and none is visible ({why_no_device()}); run this where the "
                "GPU is"
            )
        if requested not in ((), (device.target,)):
            raise PassError(f"{chosen.name} builds for the GPU at hand, which is {device.target}, not {requested[0]}")
        return (device.target,)
    if not requested and device is None:
        raise PassError(
            f"no GPU is visible; name the target: --compute-capability {'|'.join(chosen.targets)}, or make it visible: "
            f"{why_no_device()}"
        )
    wanted = set(requested or (device.target,) if device is not None else requested)
    if unknown := sorted(wanted - set(chosen.targets)):
        raise PassError(f"{chosen.name} has no target {unknown[0]}; it has {', '.join(chosen.targets)}")
    return tuple(target for target in chosen.targets if target in wanted)


MIN_COMPUTE_CAPABILITY = {"float32": 80, "bfloat16": 80, "int4": 80, "fp8": 89}
"""By format, the lowest compute capability for which TensorRT-RTX 1.7 multiplies matrices; found by building."""


def check_dtype(manifest: Manifest, targets: Sequence[str]) -> None:
    """Raises PassError if a target does not support the bundle's formats, or weights have zero points."""
    quantization = manifest.model.quantization
    if quantization is not None and quantization.zero_points:
        again = "export the bundle again with --weights int4 --no-zero-points"
        raise PassError(f"TensorRT multiplies symmetric integers only; {again}")
    for kind in (manifest.model.dtype, manifest.model.weights):
        old = [target for target in targets if int(target.removeprefix("sm")) < MIN_COMPUTE_CAPABILITY.get(kind, 0)]
        if old:
            raise PassError(f"{old[0]} has no {kind}: leave it out, or export with another --dtype or --weights")


def choose_capacity(config: EngineConfig, manifest: Manifest) -> int:
    """Return the capacity S: a multiple of 4 with room for the longest sequence plus the widest window."""
    most, window = manifest.model.max_capacity, widest(manifest).width
    if config.capacity is not None:
        if config.capacity % 4 or not window < config.capacity <= most:
            raise PassError(f"--capacity must be a multiple of 4 above {window}, at most {most}, not {config.capacity}")
        if config.max_seq_len is not None and config.max_seq_len > config.capacity:
            raise PassError(f"--max-seq-len {config.max_seq_len} does not fit --capacity {config.capacity}")
        return config.capacity
    longest = min(DEFAULT_SEQ_LEN, most) if config.max_seq_len is None else config.max_seq_len
    if not 1 <= longest <= most:
        raise PassError(f"--max-seq-len must be 1 to {most} for {manifest.model.name}, not {longest}")
    return min(most, -(-(longest + window) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE)


def choose_chunks(config: EngineConfig, manifest: Manifest, columns: Sequence[int]) -> tuple[int, ...]:
    """Return the widths of a prompt's chunks, in falling order."""
    if config.prefill_widths is None:
        return prefill_widths(manifest, columns)
    chunks = tuple(sorted(set(config.prefill_widths), reverse=True))
    if not chunks or not 2 <= chunks[-1] <= chunks[0] <= columns[-1]:
        given = ",".join(map(str, config.prefill_widths))
        raise PassError(f"--prefill-widths must be numbers from 2 to the capacity {columns[-1]}, not {given!r}")
    return chunks


def available_memory(config: EngineConfig, device: DeviceInfo | None) -> int | None:
    """Return the bytes of memory on the target GPU; None if unknown."""
    if config.device_memory is not None:
        return int(config.device_memory * 2**30)
    return None if device is None else device.total
