"""pass-run inspect: shows what a bundle holds, and which passes a GPU captures as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from pass_runtime.backends.open import GPU_DEVICES, split_device
from pass_runtime.backends.trt.engine_sets import verify_engines
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import EngineSet, Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli import flags as opts
from pass_runtime.cli.tables import show_rows
from pass_runtime.commands.errors import OneLineCommand, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import to_json
from pass_runtime.options import LoadOptions

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@click.command(cls=OneLineCommand)
@opts.BUNDLE
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--verify", is_flag=True, help="Also read all files and check their hashes.")
@click.option(
    "--device", help="Run all passes on this GPU, and show which it captures as CUDA graphs."
)
@opts.flags_of(LoadOptions, "max_batch_size")
@one_line_errors
def inspect(
    bundle: Path, as_json: bool, verify: bool, device: str | None, max_batch_size: int | None
) -> None:
    """Show what a bundle holds, from its manifest. Only --verify reads other files, and only
    --device loads engines."""
    require("cpu")
    if device is None:
        opts.refuse_given("without --device no pass is run", "max_batch_size")
    with importing():
        from pass_runtime.backends.ort.session import cpu_kernels
    manifest = read_manifest(bundle)
    if verify:
        verify_files(bundle, manifest)
        for engines in manifest.engines:
            verify_engines(bundle, engines, hashes=True)
    found = cpu_kernels(manifest, "cpu")
    missing = f" (ours are missing: {found})" if isinstance(found, str) else ""
    kernels = "onnxruntime" if found is None or isinstance(found, str) else found.name
    contents = describe(bundle, manifest) | {"verified": verify, "kernels": kernels}
    if device is not None:
        gpu, captures = find_captures(bundle, LoadOptions(device, max_batch_size=max_batch_size))
        contents |= {"device": gpu, "captures": captures}
    if as_json:
        click.echo(to_json(contents, indent=2))
    elif device is not None:
        print_captures(gpu, captures)
    else:
        print_contents(contents | {"kernels": kernels + missing})


def describe(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the contents of a bundle for JSON."""
    model, dumped = manifest.model, manifest.model_dump(mode="json")
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
    return {
        "bundle": str(bundle),
        "version": manifest.version,
        "content": manifest.content_hash,
        "model": dumped["model"] | {"kv_bytes_per_token": kv_bytes},
        **{name: dumped[name] for name in ("lookahead", "rule", "noise")},
        "windows": [
            {
                "name": window.name,
                "rows": window.width,
                "drafts": window.drafts,
                "groups": list(window.groups),
                "next": window.next.name,
                "samplers": sorted(listed.tails),
            }
            for window, listed in zip(manifest.layouts, manifest.windows, strict=True)
        ],
        "files": dict(sorted(dumped["files"].items())),
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "engines": [_engines(engines, manifest) for engines in manifest.engines],
        "tools": manifest.tools,
    }


def _engines(engines: EngineSet, manifest: Manifest) -> dict[str, Any]:
    return engines.model_dump(mode="json", exclude={"bundle", "engines"}) | {
        "current": engines.bundle == manifest.content_hash,
        "files": {
            engine.file: {"sha256": engine.sha256, "bytes": engine.bytes}
            for engine in engines.engines
        },
        "bytes": sum(engine.bytes for engine in engines.engines),
    }


def print_contents(contents: Mapping[str, Any]) -> None:
    """Print a line for every value, `model.layers: 30`, but for hashes; and a table of windows."""
    for key, value in _flat({k: v for k, v in contents.items() if k != "windows"}):
        if not key.endswith("sha256"):
            click.echo(f"{key}: {value if isinstance(value, str) else to_json(value)}")
    rows = [
        {key: value if isinstance(value, str) else to_json(value) for key, value in window.items()}
        for window in contents["windows"]
    ]
    show_rows("windows", rows, ("name", "groups", "next", "samplers"))


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for i, each in enumerate(value):
            yield from _flat(each, f"{path}.{i}")
    else:
        yield path, value


SAMPLINGS = (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, 50, 0.9))
"""Parameters that choose each of the samplers in turn: greedy, sample, truncated."""


def find_captures(bundle: Path, options: LoadOptions) -> tuple[str, Mapping[str, str | None]]:
    """Run the passes of all plans and samplers on a GPU. Return the device's name, and by the name
    of each graph or pass why it was not captured as a CUDA graph; None if it was."""
    with importing():
        from pass_runtime.decode.engine import Engine
        from pass_runtime.session import load
    if split_device(options.device)[0] == "cpu":
        raise PassError(
            f"--device {options.device} has no CUDA graphs; use one of {', '.join(GPU_DEVICES)}"
        )
    with load(bundle, options) as session:
        capabilities = session.backend.capabilities
        if capabilities.device == "cpu":
            raise PassError(
                "no CUDA graphs: no engines fit this machine, and ONNX Runtime uses the CPU; run "
                "pass-export build, or use --device cuda, whose error says what is missing"
            )
        session.warm_up(*SAMPLINGS)
        # If graphs are captured anew for each KV capacity, the warm-up captured only the passes
        # that `auto` times. The others are captured here, at one capacity, which stands for all.
        if not capabilities.keeps_graphs:
            samplers, capacity = [each.sampler for each in SAMPLINGS], capabilities.capacities[0]
            for batch in capabilities.batch_sizes:
                session.call(
                    partial(Engine.capture, capacity=capacity, size=batch, samplers=samplers)
                )
        return capabilities.device, dict(sorted(session.backend.captures.items()))


def print_captures(device: str, captures: Mapping[str, str | None]) -> None:
    """Print a line for every graph or pass, and how many were captured."""
    for name, why in captures.items():
        click.echo(f"captured: yes, {name}" if why is None else f"captured: no, {name}: {why}")
    count = sum(why is None for why in captures.values())
    click.echo(f"{device}: {count} of {len(captures)} captured as CUDA graphs")
