"""pass-run inspect: shows what a bundle holds, and which passes a GPU captures as CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from pass_runtime.backends.devices import GPU_DEVICES, split_device
from pass_runtime.backends.trt.engine_sets import verify_engines
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import EngineSet, Manifest, PlanInfo
from pass_runtime.bundle.noise import BLOCK_SIZE
from pass_runtime.bundle.plan import Plan
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.sampling import SamplingParams
from pass_runtime.cli.tables import OutputConsole, show_table
from pass_runtime.commands.errors import importing
from pass_runtime.errors import PassError
from pass_runtime.files import to_json
from pass_runtime.options import LoadOptions

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def run_inspect(
    bundle: Path,
    *,
    as_json: bool,
    verify: bool,
    device: str | None = None,
    max_batch_size: int | None = 1,
) -> None:
    """Print the contents of the manifest as tables or JSON. verify: whether to check the hash of
    every file first, with a PassError if one differs. device: a GPU on which to run all passes;
    what it captures is printed in place of the tables, or in further fields of the JSON."""
    with importing():
        from pass_runtime.backends.ort.trunks import cpu_kernels
    manifest = read_manifest(bundle)
    if verify:
        verify_files(bundle, manifest)
        for engines in manifest.engines:
            verify_engines(bundle, engines, hashes=True)
    found = cpu_kernels(manifest, "cpu")
    missing = f" (ours are missing: {found})" if isinstance(found, str) else ""
    kernels = "onnxruntime" if found is None or isinstance(found, str) else found.name
    contents = describe(bundle, manifest) | {"verified": verify, "kernels": kernels}
    gpu, captures = ("", {}) if device is None else find_captures(bundle, device, max_batch_size)
    if as_json:
        device_fields = {"device": gpu, "captures": captures} if device else {}
        click.echo(to_json(contents | device_fields, indent=2))
    elif device:
        print_captures(gpu, captures)
    else:
        print_tables(contents, kernels + missing)


def describe(bundle: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the contents of a bundle for JSON."""
    model = manifest.model
    kv_bytes = 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[model.dtype]
    return {
        "bundle": str(bundle),
        "version": manifest.version,
        "content": manifest.content_hash,
        "model": model.model_dump(mode="json") | {"kv_bytes_per_token": kv_bytes},
        "lookahead": manifest.lookahead.model_dump(mode="json"),
        "rule": manifest.rule,
        "noise": manifest.noise.model_dump(mode="json"),
        "plans": [
            _plan(plan, listed)
            for plan, listed in zip(manifest.layouts, manifest.plans, strict=True)
        ],
        "files": {
            name: info.model_dump(mode="json") for name, info in sorted(manifest.files.items())
        },
        "bytes": sum(info.bytes for info in manifest.files.values()),
        "engines": [_engines(engines, manifest) for engines in manifest.engines],
        "tools": manifest.tools,
    }


def _plan(plan: Plan, listed: PlanInfo) -> dict[str, Any]:
    """Return a plan for JSON. listed: its entry in the manifest."""
    return {
        "name": plan.name,
        "rows": plan.width,
        "drafts": plan.drafts,
        "groups": list(plan.groups),
        "next": plan.next.name,
        "samplers": sorted(listed.tails),
    }


def _engines(engines: EngineSet, manifest: Manifest) -> dict[str, Any]:
    """Return a set of engines for JSON. `current`: whether it was built from the present files."""
    return engines.model_dump(mode="json", exclude={"bundle", "engines"}) | {
        "current": engines.bundle == manifest.content_hash,
        "files": {
            engine.file: {"sha256": engine.sha256, "bytes": engine.bytes}
            for engine in engines.engines
        },
        "bytes": sum(engine.bytes for engine in engines.engines),
    }


def print_tables(contents: dict[str, Any], kernels: str) -> None:
    """Print the contents, except the hashes, as tables. kernels: those that run on this CPU."""
    console = OutputConsole(highlight=False)
    table = Table(title=escape(contents["bundle"]), title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*_rows(contents), ("kernels on this CPU", kernels)):
        table.add_row(name, escape(value))
    console.print(table)
    samplers = sorted({sampler for plan in contents["plans"] for sampler in plan["samplers"]})
    plans = Table(title=f"plans, with samplers {_listed(samplers)}", title_justify="left")
    for heading in ("plan", "rows", "drafts", "groups", "next"):
        plans.add_column(heading, justify="right" if heading in ("rows", "drafts") else "left")
    for plan in contents["plans"]:
        plans.add_row(
            plan["name"],
            str(plan["rows"]),
            str(plan["drafts"]),
            _listed(plan["groups"]),
            plan["next"],
        )
    show_table(console, plans)


def _rows(contents: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the first table: (heading, value)."""
    model, lookahead = contents["model"], contents["lookahead"]
    sizes = {name: info["bytes"] for name, info in contents["files"].items()}
    tails = [size for name, size in sizes.items() if name.startswith("tail.")]
    others = {name: size for name, size in sizes.items() if not name.startswith("tail.")}
    rank = lookahead["adapter_rank"]
    return [
        ("model", f"{model['name']} ({model['family']})"),
        ("source", model["source"]),
        (
            "size",
            f"{model['layers']} layers, hidden {model['hidden_size']}, vocabulary "
            f"{model['vocab_size']}",
        ),
        (
            "attention",
            f"{model['heads']} heads, {model['kv_heads']} KV heads, head dimension "
            f"{model['head_dim']}",
        ),
        (
            "context",
            f"{model['max_capacity']} tokens, {_size(model['kv_bytes_per_token'])} of KV cache "
            "per token",
        ),
        ("dtype", f"{model['dtype']}, linear layers {model['weights']}"),
        *_quantization(model["quantization"]),
        (
            "start, end tokens",
            f"{_listed([model['bos_token_id']])}; {_listed(model['eos_token_ids'])}",
        ),
        (
            "look-ahead",
            f"L={lookahead['length']}, {'trained' if lookahead['trained'] else 'untrained'}",
        ),
        ("look-ahead weights", lookahead["source"]),
        ("adapter", f"rank {rank}, on look-ahead rows" if rank else "none"),
        ("draft head", _head(lookahead["head"])),
        ("acceptance by position", _rates(lookahead["acceptance_per_position"])),
        ("  temperature 0.8", _rates(lookahead["acceptance_per_position_sampled"])),
        ("rule", contents["rule"]),
        (
            "files",
            f"{len(sizes)}, {_size(contents['bytes'])}"
            + (", all verified" if contents["verified"] else ""),
        ),
        *((f"  {name}", _size(size)) for name, size in others.items()),
        ("  tails", f"{len(tails)} files, {_size(sum(tails))}"),
        *(("engines", _engine_row(engines)) for engines in contents["engines"] or [None]),
        ("made with", _listed([" ".join(tool) for tool in contents["tools"].items()])),
        ("format", f"version {contents['version']}, noise {contents['noise']['scheme']}"),
    ]


def _rates(rates: list[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates) or "not measured"


def _head(head: dict[str, Any] | None) -> str:
    if head is None:
        return "none"
    candidates = f"drafts from the {head['blocks']} likeliest blocks of {BLOCK_SIZE} token ids"
    return f"rank {head['rank']}, state width {head['width']}, {candidates}"


def _quantization(quantization: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the rows about quantization: the scheme of most layers, then the exceptions."""
    if quantization is None:
        return []
    lm_head, exceptions = quantization["lm_head"], quantization["layers"]
    head = "none" if lm_head is None else _scheme(lm_head)
    by_scheme: dict[str, list[str]] = {}
    for layer, scheme in exceptions.items():
        by_scheme.setdefault(_scheme(scheme), []).append(layer)
    return [
        ("  weights", f"{_scheme(quantization['grid'])}; LM head {head}"),
        *((f"  {scheme}", _listed(layers)) for scheme, layers in by_scheme.items()),
    ]


def _scheme(scheme: dict[str, Any]) -> str:
    scales = (
        "per output channel"
        if scheme["block_size"] is None
        else f"in blocks of {scheme['block_size']}"
    )
    return f"{scheme['numbers']} {scales}{' with zero points' if scheme['zero_points'] else ''}"


def _engine_row(engines: dict[str, Any] | None) -> str:
    if engines is None:
        return "none"
    state = "" if engines["current"] else "; built from other files, so it is not used"
    return (
        f"{engines['library']} {engines['version']} for {_listed(engines['targets'])}, capacity "
        f"{engines['capacities'][-1]}, batch {engines['max_batch_size']}, "
        f"L={engines['lookahead']}, {_size(engines['bytes'])}{state}"
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join("none" if value is None else str(value) for value in values) or "none"


def _size(count: int) -> str:
    """Return a number of bytes as text: 1234567 as `1.2 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} bytes"


SAMPLINGS = (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, 50, 0.9))
"""Parameters that choose each of the samplers in turn: greedy, sample, truncated."""


def find_captures(
    bundle: Path, device: str, max_batch_size: int | None
) -> tuple[str, Mapping[str, str | None]]:
    """Run the passes of all plans and samplers on a device. Return the device's name, and a map
    from the name of each graph or pass to None if it was captured as a CUDA graph, or else to the
    reason why it was not. Raises PassError if the device has no CUDA graphs."""
    with importing():
        from pass_runtime.decode.worker import capture_graphs
        from pass_runtime.session import load
    if split_device(device)[0] == "cpu":
        raise PassError(
            f"--device {device} has no CUDA graphs; use one of {', '.join(GPU_DEVICES)}"
        )
    with load(bundle, LoadOptions(device, max_batch_size=max_batch_size)) as session:
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
                    partial(capture_graphs, capacity=capacity, batch=batch, samplers=samplers)
                )
        return capabilities.device, dict(sorted(session.backend.captures.items()))


def print_captures(device: str, captures: Mapping[str, str | None]) -> None:
    """Print a line for every graph or pass, and how many were captured."""
    for name, why in captures.items():
        click.echo(f"captured: yes, {name}" if why is None else f"captured: no, {name}: {why}")
    count = sum(why is None for why in captures.values())
    click.echo(f"{device}: {count} of {len(captures)} captured as CUDA graphs")
