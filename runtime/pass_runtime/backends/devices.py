"""The names of devices. A name may end in a GPU's number: `cuda:1` is GPU 1, `cuda` is GPU 0."""

from __future__ import annotations

from pass_runtime.backends.trt.library import LIBRARIES
from pass_runtime.errors import PassError

GPU_DEVICES = ("cuda", *LIBRARIES)
DEVICES = ("cpu", *GPU_DEVICES, "auto")
DEVICE_HELP = f"{', '.join(DEVICES)}; add the number of a GPU other than the first, as in cuda:1."
"""Help for an option that takes a device."""


def split_device(name: str) -> tuple[str, int]:
    """Split `name` into one of DEVICES and the number of the GPU among those that this process sees
    (0 if `name` has none). Raises PassError if `name` is not a device."""
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
