"""Chooses the GPUs, the KV capacity and the widths of prompt chunks that engines are built for."""

from __future__ import annotations

from collections.abc import Sequence

from pass_exporter.engines.profiles import default_prefill_widths, widest_window
from pass_runtime.backends.cuda import DeviceInfo, why_no_device
from pass_runtime.backends.trt.library import Library
from pass_runtime.bundle.manifest import Manifest
from pass_runtime.errors import PassError

DEFAULT_MAX_SEQ_LEN = 4096
CAPACITY_MULTIPLE = 64
"""Attention kernels read entries in blocks."""
MIN_COMPUTE_CAPABILITY = {"float32": 80, "bfloat16": 80, "int4": 80, "fp8": 89}
"""The lowest (80 is 8.0) for which TensorRT-RTX 1.7 built matrix products. Others have no limit."""


def choose_targets(
    library: Library, names: Sequence[str], device: DeviceInfo | None
) -> tuple[str, ...]:
    """Return the compute capabilities to build for, such as `sm89`; this machine's GPU without
    `names` (8.9, 89 or sm89). Raises PassError if the library cannot build for one."""
    requested = tuple(f"sm{name.lower().removeprefix('sm').replace('.', '')}" for name in names)
    if not library.builds_ahead:
        if device is None:
            raise PassError(
                f"{library.name} builds for this machine's GPU and none is visible "
                f"({why_no_device()}); build on a machine with a GPU"
            )
        if requested not in ((), (device.target,)):
            raise PassError(
                f"{library.name} builds for this machine's GPU, which is {device.target}, not "
                f"{' and '.join(requested)}; leave out --compute-capability, or build on that GPU"
            )
        return (device.target,)
    if not requested:
        if device is None:
            raise PassError(
                "no GPU is visible; name the target: --compute-capability "
                f"{'|'.join(library.targets)}, or make it visible: {why_no_device()}"
            )
        requested = (device.target,)
    if message := library.unknown_target(requested):
        raise PassError(message)
    # In the library's order, and each once
    return tuple(target for target in library.targets if target in requested)


def check_formats(manifest: Manifest, targets: Sequence[str]) -> None:
    """Raise PassError if a target does not support a format, or weights have zero points."""
    quantization = manifest.model.quantization
    if quantization is not None and quantization.zero_points:
        advice = "export the bundle again with --weights int4 --no-zero-points"
        raise PassError(f"TensorRT does not support zero points; {advice}")
    for number_format in (manifest.model.dtype, manifest.model.weights):
        minimum = MIN_COMPUTE_CAPABILITY.get(number_format, 0)
        unfit = [target for target in targets if int(target.removeprefix("sm")) < minimum]
        if unfit:
            advice = "choose other targets, or export with another --dtype or --weights"
            raise PassError(f"{unfit[0]} does not support {number_format}; {advice}")


def choose_capacity(capacity: int | None, max_seq_len: int | None, manifest: Manifest) -> int:
    """Return the KV capacity in tokens: `capacity`, or room for the longest sequence and the widest
    window. Raises PassError if an option is out of range."""
    limit, window = manifest.model.max_capacity, widest_window(manifest).width
    if capacity is not None:
        if capacity % 4 or not window < capacity <= limit:
            raise PassError(
                f"--capacity must be a multiple of 4 above {window}, at most {limit}, not "
                f"{capacity}"
            )
        if max_seq_len is not None and max_seq_len > capacity:
            raise PassError(f"--max-seq-len {max_seq_len} is above --capacity {capacity}; lower it")
        return capacity
    longest = min(DEFAULT_MAX_SEQ_LEN, limit) if max_seq_len is None else max_seq_len
    if not 1 <= longest <= limit:
        raise PassError(
            f"--max-seq-len must be 1 to {limit} for {manifest.model.name}, not {longest}"
        )
    return min(limit, -(-(longest + window) // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE)


def choose_widths(
    requested: Sequence[int], manifest: Manifest, columns: Sequence[int]
) -> tuple[int, ...]:
    """Return the widths of prompt chunks, in falling order. Raises PassError if one is out of
    range."""
    if not requested:
        return default_prefill_widths(manifest, columns)
    widths = tuple(sorted(set(requested), reverse=True))
    if not 2 <= widths[-1] <= widths[0] <= columns[-1]:
        value = ",".join(map(str, requested))
        raise PassError(
            f"--prefill-widths must be numbers from 2 to the capacity {columns[-1]}, not {value!r}"
        )
    return widths


def available_memory(device_memory: float | None, device: DeviceInfo | None) -> int | None:
    """Return the bytes of the target GPU's memory; None if unknown. device_memory: in GiB."""
    if device_memory is not None:
        return int(device_memory * 2**30)
    return None if device is None else device.total
