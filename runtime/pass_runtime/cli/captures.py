"""What `pass-run inspect --device` tells: which graphs and passes a device captures as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from pass_runtime.backends.device_names import GPU_DEVICES, split_device
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.errors import importing
from pass_runtime.errors import PassError
from pass_runtime.options import LoadOptions

SAMPLINGS = (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, 50, 0.9))
"""One for each sampler."""


def find_captures(bundle: Path, device: str, max_batch_size: int | None) -> tuple[str, Mapping[str, str | None]]:
    """Open the bundle on a device and run every pass that requests begin with. Returns the device, and for each graph
    or pass None where it was captured, else the reason why not. PassError where the device captures nothing."""
    with importing():
        from pass_runtime.decode.rehearsal import rehearse
        from pass_runtime.session import load
    if split_device(device)[0] == "cpu":
        raise PassError(f"--device {device} has no CUDA graphs; use one of {', '.join(GPU_DEVICES)}")
    with load(bundle, LoadOptions(device, max_batch_size=max_batch_size)) as session:
        limits = session.backend.capabilities
        if limits.device == "cpu":
            raise PassError("no engines fit this machine and ONNX Runtime has no CUDA, so there are no CUDA graphs")
        session.warm_up(*SAMPLINGS)
        if not limits.keeps_graphs:  # A warm-up ran what is timed, and captures are of one capacity alone.
            samplers = [each.sampler for each in SAMPLINGS]
            for batch in limits.batch_sizes:
                session.call(partial(rehearse, capacity=limits.capacities[0], batch=batch, samplers=samplers))
        return limits.device, dict(sorted(session.backend.captures.items()))


def print_captures(device: str, captures: Mapping[str, str | None]) -> None:
    """A line for each."""
    for name, why in captures.items():
        click.echo(f"captured: yes, {name}" if why is None else f"captured: no, {name}: {why}")
    count = sum(why is None for why in captures.values())
    click.echo(f"{device}: {count} of {len(captures)} captured as CUDA graphs")
