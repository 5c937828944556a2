"""The first step, within seconds: copies to the device and back, a captured copy that is replayed, versions, memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from pass_runtime.backends.cuda import Cuda, call, find_device, import_api, why_no_device
from pass_runtime.cli.bench import write_json
from pass_runtime.cli.command_errors import one_line_errors
from pass_runtime.errors import PassError

SIZE = 1 << 20
"""Bytes of a copy."""


def check(api: Any) -> dict[str, Any]:
    """Return the checks with their results, and what could not be captured. PassError where copies come back changed,
    or the device fails."""
    device = find_device(api)
    if device is None:
        raise PassError(why_no_device(api))
    checks = {
        "GPU": f"{device.name}, {device.target}",
        "memory": f"{device.free >> 20} of {device.total >> 20} MiB free",
    }
    for name in ("cudaDriverGetVersion", "cudaRuntimeGetVersion"):
        if hasattr(api, name):
            version = call(getattr(api, name)(), name)
            checks[name] = f"{version // 1000}.{version % 1000 // 10}"
    cuda, uncaptured = Cuda(api), {}
    try:
        given = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
        address, pinned = cuda.allocate(SIZE), cuda.pinned((SIZE,), np.uint8)
        back = np.zeros_like(given)
        cuda.upload(address, given)
        cuda.download(back, address)
        _compare(back, given, "a copy to the GPU and back")
        checks["copy"] = "unchanged"
        try:
            graph = cuda.capture(lambda: cuda.enqueue_download(pinned, address))
        except PassError as error:
            uncaptured["a copy"] = checks["capture"] = str(error)
        else:
            for replay in range(2):
                cuda.upload(address, np.roll(given, replay))
                cuda.launch(graph)
                cuda.synchronize()
                _compare(pinned, np.roll(given, replay), "a captured copy")
            checks["capture"] = "replayed twice"
    finally:
        cuda.close()
    return {"checks": [{"check": name, "result": found} for name, found in checks.items()], "uncaptured": uncaptured}


def _compare(found: npt.NDArray[np.uint8], expected: npt.NDArray[np.uint8], what: str) -> None:
    if wrong := int((found != expected).sum()):
        raise PassError(f"{what} changed {wrong} of {expected.size} bytes: GPU or driver are broken")


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the results here, as JSON.")
@one_line_errors
def main(output: Path | None) -> None:
    """Check that GPU 0 copies and captures."""
    report = check(import_api())
    write_json(report, output)
    for each in report["checks"]:
        click.echo(f"{each['check']}: {each['result']}")


if __name__ == "__main__":
    main()
