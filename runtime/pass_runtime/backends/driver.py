"""What error messages say about an NVIDIA driver that is missing or too old. In all functions `api`
is the module `cuda.bindings.runtime`, None if it cannot be imported."""

from __future__ import annotations

from typing import Any

MIN_DRIVER_BRANCH = {12: 525, 13: 580}
"""Major version of CUDA -> the first branch of NVIDIA's Linux driver that runs it."""


def driver_hint(api: Any | None) -> str:
    """Return the end of an error message: what to do about the driver, and, if `api` reports them,
    the CUDA versions of driver and library."""
    driver, library = driver_version(api), _version(api, "cudaRuntimeGetVersion")
    if driver == 0:
        return "; there is no NVIDIA driver here: is the GPU visible to nvidia-smi?"
    if driver is None or library is None:
        return (
            "; the driver is older than the CUDA library: update it (nvidia-smi shows the "
            "CUDA version that it runs)"
        )
    major = library // 1000
    newer = f", {MIN_DRIVER_BRANCH[major]} or newer" if major in MIN_DRIVER_BRANCH else ""
    return (
        f"; the driver is older than the CUDA library: it runs CUDA up to {_dotted(driver)}, and "
        f"the library is CUDA {_dotted(library)}; update to a driver for CUDA {major}{newer} "
        "(nvidia-smi shows which is installed)"
    )


def driver_version(api: Any | None) -> int | None:
    """Return the newest CUDA version that the driver runs, as 13040 for 13.4; 0 without a driver,
    None if the version is unknown."""
    return _version(api, "cudaDriverGetVersion")


def _version(api: Any | None, name: str) -> int | None:
    """Return the version that the CUDA function `name` reports; None if it fails or is missing."""
    code, *values = getattr(api, name)() if hasattr(api, name) else (1,)
    return int(values[0]) if int(code) == 0 else None


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
