"""pass-export: the command line of exports, engine builds and Triton's models."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from pass_exporter.config import EngineConfig, ExportConfig
from pass_exporter.engines.target import choose_targets
from pass_exporter.options import model_flags
from pass_exporter.terminal import Terminal, silence_libraries
from pass_exporter.triton import RepositoryConfig, write_model
from pass_runtime.backends.cuda import find_device
from pass_runtime.backends.trt.library import LIBRARIES, find_library, import_library
from pass_runtime.cli.flags import combined, flag_of, flags_of, parse_sizes
from pass_runtime.commands.errors import OneLineGroup, importing, one_line_errors, require
from pass_runtime.errors import PassError
from pass_server.triton.config import PARAMETERS

if TYPE_CHECKING:
    from pass_exporter.export import ExportReport


class _ExportGroup(OneLineGroup):
    def collect_usage_pieces(self, _ctx: click.Context) -> list[str]:
        return ["--model MODEL [OPTIONS]", "| build BUNDLE [OPTIONS]", "| triton BUNDLE -o REPO"]


PREFILL_WIDTHS = click.option(
    "--prefill-widths",
    metavar="N,N,...",
    callback=parse_sizes,
    help="Sizes of prefill chunks, in tokens.  [default: up to 2048, if memory allows]",
)
"""`flags_of` makes no flag that needs a callback."""
ENGINE_FLAGS = combined(
    flags_of(EngineConfig, "max_batch_size", "max_seq_len", "capacity"),
    PREFILL_WIDTHS,
    flags_of(EngineConfig, "workspace", "timing_cache", "compute_capability", "device_memory"),
)
"""Named as in trtexec and Polygraphy."""


@click.group(
    cls=_ExportGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@model_flags
@flags_of(ExportConfig, "lookahead", "lookahead_weights", "output", "dtype", "weights", "calibrate")
@click.option(
    "--zero-points/--no-zero-points",
    default=None,
    help="A zero point per block of int4 or int8 weights: smaller rounding errors, but not for "
    "TensorRT.  [default: only for int4 in fp32 without --engine]",
)
@flags_of(ExportConfig, "target", "cuda_attention", "rule", "verify", "max_perplexity_ratio")
@click.option(
    "--engine",
    type=click.Choice(tuple(LIBRARIES)),
    help="Build TensorRT engines too, with the options below.",
)
@ENGINE_FLAGS
@flags_of(ExportConfig, "force")
@one_line_errors
def main(**options: Any) -> None:
    """Export a frozen decoder with look-ahead embeddings into a bundle, or build engines for
    one."""
    context = click.get_current_context()
    given_names = [
        name
        for name in options
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE
    ]
    if context.invoked_subcommand is not None:
        if given_names:
            flag = f"--{given_names[0].replace('_', '-')}"
            raise PassError(f"put {flag} after `{context.invoked_subcommand}`, or leave it out")
        return
    engine = None
    if options["engine"] is not None:
        values = {name: options[name] for name in _ENGINE_ONLY_OPTIONS}
        engine = EngineConfig(force=options["force"], **values)
    if options["model"] is None:
        raise PassError(
            "name the model: pass-export --model NAME (see --help), or pass-export build BUNDLE"
        )
    if engine is None and (
        unused := next((name for name in given_names if name in _ENGINE_ONLY_OPTIONS), None)
    ):
        raise PassError(
            f"--{unused.replace('_', '-')} is about engines: add --engine {' or '.join(LIBRARIES)}"
        )
    if engine is not None:
        if options["zero_points"]:
            raise PassError(
                "TensorRT does not support zero points: leave out --zero-points, or --engine"
            )
        if options["target"] == "cpu":
            raise PassError("--target cpu leaves out what engines are built from: leave it out")
        options["zero_points"] = False  # None may mean True
    if "max_perplexity_ratio" in given_names and options["verify"] is None:
        raise PassError("--max-perplexity-ratio is about a text: add --verify TEXT")
    require("cpu", "export")
    if engine is not None:
        _check_engine(engine)  # first, because finding the model takes longer
    options["dtype"] = options["dtype"] or _default_dtype(
        options["model"], options["revision"], engine
    )
    config = ExportConfig(
        **{name: value for name, value in options.items() if name not in _ENGINE_ONLY_OPTIONS}
    )
    _export(config, engine)


def _check_engine(engine: EngineConfig) -> None:
    require(engine.engine)
    import_library(find_library(engine.engine))
    choose_targets(find_library(engine.engine), engine.compute_capability, find_device())


def _default_dtype(model: str, revision: str | None, engine: EngineConfig | None) -> str:
    if engine is None:
        return "fp32"
    with importing("export"):
        from pass_exporter.model.load import stored_dtype
        from pass_exporter.model.registry import resolve

    return stored_dtype(resolve(model, revision))


# `force` and `verify` are options of exports too; there `verify` names a text.
_ENGINE_ONLY_OPTIONS = {field.name for field in fields(EngineConfig)} - {"force", "verify"}


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--engine",
    type=click.Choice(tuple(LIBRARIES)),
    required=True,
    help="The library to build with.",
)
@ENGINE_FLAGS
@flags_of(EngineConfig, "verify", "force")
@one_line_errors
def build(bundle: Path, **options: Any) -> None:
    """Build TensorRT engines for BUNDLE. Resumes an interrupted build."""
    _build(bundle, EngineConfig(**options), Console(stderr=True))
    click.echo(bundle)


def _build(bundle: Path, config: EngineConfig, console: Console) -> None:
    require(*(["cpu"] if config.verify else []), config.engine)
    console.print(f"[bold]pass-export build[/] {bundle}, {config.engine}")
    with importing(config.engine):
        from pass_exporter.engines.build import build_engines
    with Terminal(console) as progress:
        report = build_engines(bundle, config, progress)
    engines = report.engines
    profiles = len(engines.engines[-1].profiles)  # the trunk's engine is the last
    console.print(f"engines                 {len(engines.engines)} in {engines.path(bundle)}")
    if report.resumed:
        console.print(f"  of which {report.resumed} were built by an interrupted run")
    console.print(f"size                    {report.bytes / 1e9:.2f} GB")
    console.print(f"targets                 {', '.join(engines.targets)}")
    console.print(
        f"capacity                {engines.capacities[-1]}, {profiles} profiles of the trunk"
    )
    console.print(f"device memory           about {report.memory}")
    for each in report.comparisons:
        limit = f"(limit {each.limit:.0e})"
        console.print(
            f"{each.window:23} logits differ from ONNX Runtime's by {each.relative:.1e} {limit}"
        )


@main.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    required=True,
    help="Model repository, existing or new.",
)
@flags_of(RepositoryConfig, "served_model_name")
@click.option(
    "--text/--tokens", "text", default=True, help="Text in and out (the default), or token ids."
)
@click.option(
    "--reference/--copy",
    "reference",
    default=True,
    help="Refer to the bundle's path (the default), or copy it.",
)
@flags_of(RepositoryConfig, "instances")
@combined(*(flag_of(option, unset=True) for option in PARAMETERS.values()))
@flags_of(RepositoryConfig, "force")
@one_line_errors
def triton(text: bool, reference: bool, **options: Any) -> None:
    """Add BUNDLE to a model repository of NVIDIA's Triton Inference Server."""
    chosen = {name: options.pop(name) for name in PARAMETERS}
    parameters = {name: value for name, value in chosen.items() if value is not None}
    config = RepositoryConfig(tokens=not text, copy=not reference, parameters=parameters, **options)
    click.echo(write_model(config))


def _export(config: ExportConfig, engine: EngineConfig | None) -> None:
    console = Console(stderr=True)
    weights = "" if config.weights == "full" else f", {config.weights} weights"
    console.print(
        f"[bold]pass-export[/] {config.model}, look-ahead {config.lookahead}, "
        f"{config.dtype}{weights}"
    )
    silence_libraries()
    # These raise errors for unreadable files before the long work.
    config.verification_text()
    config.calibration_text()
    # --help and errors in options should not wait for the import of torch, which takes seconds.
    with Terminal(console) as progress:
        progress.phase("importing torch")
        with importing("export"):
            from pass_exporter.export import export
        report = export(config, progress)
    _print_report(console, config, report)
    if engine is not None:
        _build(report.output, engine, console)
    elif config.dtype == "bf16":
        console.print(
            "[yellow]ONNX Runtime cannot run bf16: build engines next (pass-export build "
            f"{report.output} --engine {' or '.join(LIBRARIES)}), or export with --dtype fp16 or "
            "fp32[/]",
            soft_wrap=True,
        )
    click.echo(report.output)


def _print_report(console: Console, config: ExportConfig, report: ExportReport) -> None:
    info = report.manifest.lookahead
    console.print(f"look-ahead embeddings   {info.source}")
    if not info.trained and config.lookahead_weights is None:
        console.print(
            "[yellow]  no trained embeddings are shipped for this model: pass-train makes them[/]"
        )
    if not info.trained:
        console.print(
            "[yellow]  drafts of untrained embeddings are rarely accepted; the text is exact "
            "either way[/]"
        )
    limit = f"(limit {report.relative_error_limit:.0e})"
    console.print(f"trunk against torch     max relative error {report.relative_error:.1e} {limit}")
    decoding = report.decoding
    note = f", then {decoding.near_tie}" if decoding.near_tie else ""
    if decoding.greedy_tokens is not None:
        console.print(f"every plan against ar   {decoding.greedy_tokens} greedy tokens equal{note}")
    else:
        console.print(
            "every plan against ar   not run: ONNX Runtime would need a float32 copy of all "
            "weights (pass-run bench compares plans)"
        )
    if (quality := decoding.quality) is not None:
        console.print(
            f"perplexity              {quality.perplexity:.2f}, of the full-precision model "
            f"{quality.full_perplexity:.2f} ({quality.tokens} tokens)"
        )
        console.print(f"greedy agreement        {100 * quality.agreement:.1f} % of tokens")
    console.print(f"peak memory             {_peak_memory() / 1e9:.2f} GB")


def _peak_memory() -> int:
    with suppress(OSError, StopIteration):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return (
            int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))
            * 1024
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
