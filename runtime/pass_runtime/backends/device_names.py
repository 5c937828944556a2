"""Names of devices, and which of several GPUs a name is about: `cuda:1` is `cuda` on GPU 1, `cuda` is on GPU 0."""

from __future__ import annotations

from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.errors import PassError

GPU_DEVICES = ("cuda", *LIBRARIES)
DEVICES = ("cpu", *GPU_DEVICES, "auto")
NUMBERED = f"{', '.join(DEVICES)}; a GPU other than the first by its number, as cuda:1."
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
