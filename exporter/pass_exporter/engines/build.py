"""Builds all engines of a bundle, first the tails and then the trunk, and lists them in the
manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pass_exporter.config import EngineConfig
from pass_exporter.engines import staging as engine_staging
from pass_exporter.engines.builder import EngineBuilder, Source
from pass_exporter.engines.graph import aliases, tail_for_tensorrt, trunk_for_tensorrt, widened
from pass_exporter.engines.memory import MemoryEstimate, check_fits, estimate
from pass_exporter.engines.profiles import (
    column_steps,
    engine_plans,
    logprobs_profiles,
    processors_profiles,
    tail_profiles,
    trunk_profiles,
)
from pass_exporter.engines.target import (
    available_memory,
    check_formats,
    choose_capacity,
    choose_targets,
    choose_widths,
)
from pass_exporter.progress import Progress, Step
from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.backends.trt.library import find_library, import_library
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import EngineFile, EngineSet, Graph, Manifest, Profile, Tensor
from pass_runtime.bundle.read import read_manifest
from pass_runtime.bundle.tensors import COLUMNS
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

if TYPE_CHECKING:
    from pass_exporter.engines.compare import Comparison

BUILD_FLAGS_KEY = "user allocation"
"""Names the flags that `EngineBuilder` sets, as a part of `_key`. Change it with the flags, so that
no build takes over engines that an interrupted build made with other flags."""


@dataclass(frozen=True)
class BuildReport:
    """The result of `build_engines`. memory: what decoding needs. resumed: how many of the engines
    an interrupted build had finished. comparisons: by plan, () if the engines were not compared."""

    engines: EngineSet
    memory: MemoryEstimate
    resumed: int
    comparisons: tuple[Comparison, ...]

    @property
    def bytes(self) -> int:
        return sum(engine.bytes for engine in self.engines.engines)


@dataclass(frozen=True)
class _Job:
    """A build with checked settings. name: the engines' library, version and targets. columns: as
    for `trunk_profiles`. sources: the graphs to build engines from, the trunk last."""

    manifest: Manifest
    name: str
    targets: tuple[str, ...]
    columns: tuple[int, ...]
    prefill_widths: tuple[int, ...]
    sources: Sequence[Source]
    memory: MemoryEstimate
    builder: EngineBuilder


def build_engines(bundle: Path, config: EngineConfig, progress: Progress) -> BuildReport:
    """Build all engines and install them in `bundle`.

    Raises PassError if a setting is invalid or a build fails, and, if `config.verify` is set and
    the engines' logits differ too much, after the installation.
    """
    progress.phase("checking the bundle")
    job = _prepare(bundle, config)
    with engine_staging.staging(bundle, job.name) as directory:
        files, resumed = _build_all(job, directory, config.timing_cache, progress)
        engines = EngineSet(
            directory=f"{job.name}-{_digest(file.sha256 for file in files)}",
            library=job.builder.library.name,
            version=job.builder.version,
            targets=job.targets,
            bundle=job.manifest.content_hash,
            lookahead=job.manifest.lookahead.length,
            max_batch_size=config.max_batch_size,
            capacities=job.columns,
            prefill_widths=job.prefill_widths,
            engines=tuple(files),
        )
        progress.phase("writing the manifest")
        engine_staging.install(bundle, directory, engines)
    comparisons: list[Comparison] = []
    if config.verify:
        from pass_exporter.engines.compare import compare_engines

        progress.phase("comparing with ONNX Runtime")
        comparisons = compare_engines(bundle, config.engine)
    return BuildReport(engines, job.memory, resumed, tuple(comparisons))


def _prepare(bundle: Path, config: EngineConfig) -> _Job:
    """Check all settings before anything is built. Raises PassError if a setting is wrong."""
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    library, device = find_library(config.engine), find_device()
    import_library(library)  # Raises PassError if it is not installed.
    targets = choose_targets(library, config.compute_capability, device)
    if library.builds_ahead:
        check_formats(manifest, targets)
    if config.timing_cache is not None and not library.timing_cache:
        raise PassError(f"{library.name} keeps no timing cache; leave out --timing-cache")
    if config.verify and device is None:
        raise PassError(
            f"--verify runs the engines and no GPU is visible ({why_no_device()}); leave it out, "
            "or build on a machine with a GPU"
        )
    columns = column_steps(choose_capacity(config.capacity, config.max_seq_len, manifest))
    widths = choose_widths(config.prefill_widths, manifest, columns)
    sources = graph_sources(
        bundle, manifest, columns, config.max_batch_size, library.least_width, widths
    )
    workspace = None if config.workspace is None else config.workspace << 20
    memory = estimate(
        bundle, manifest, sources[-1].profiles, columns[-1], config.max_batch_size, workspace or 0
    )
    check_fits(memory, available_memory(config.device_memory, device), columns[-1])
    builder = EngineBuilder(
        library,
        targets if library.builds_ahead else (),
        workspace,
        _read_timing_cache(config.timing_cache),
    )
    name = "-".join([library.name, builder.version, *targets])
    existing = {(engines.library, engines.version, engines.targets) for engines in manifest.engines}
    if (library.name, builder.version, targets) in existing and not config.force:
        raise PassError(f"{bundle} has engines {name} already; use --force to build them again")
    return _Job(manifest, name, targets, columns, widths, sources, memory, builder)


def _build_all(
    job: _Job, directory: Path, timing_cache: Path | None, progress: Progress
) -> tuple[list[EngineFile], int]:
    """Build all engines that are not in `directory` yet. Return the manifest entries of all, in the
    order of `job.sources`, and the number of those that were there."""
    *tails, trunk = job.sources
    files: list[EngineFile] = []
    resumed = 0

    def add(source: Source, step: Step) -> None:
        nonlocal resumed
        key = _key(source, job)
        file = engine_staging.finished_engine(directory, _file_name(source), key)
        if file is not None:
            resumed += 1
        else:
            file = _save(directory, job.builder.build(source, step), source, key)
            if timing_cache is not None:
                write_whole(timing_cache, job.builder.timing_cache)
        files.append(file)

    tail_step = progress.phase(f"building {len(tails)} tails")
    for done, source in enumerate(tails, 1):
        add(source, lambda _done, _total: None)  # A tail counts as one step.
        tail_step(done, len(tails))
    add(trunk, progress.phase("building the trunk"))
    return files, resumed


def graph_sources(
    bundle: Path,
    manifest: Manifest,
    columns: Sequence[int],
    max_batch_size: int = 1,
    least_width: int = 1,
    prefill_widths: Sequence[int] | None = None,
) -> list[Source]:
    """Return the graphs that the plans of `engine_plans` need, the trunk last: if a library is too
    old, the build of a tail fails sooner than that of the trunk.

    columns, least_width, prefill_widths: as for `trunk_profiles`.
    """
    sources, capacity = [], columns[-1]
    for plan in engine_plans(manifest):
        profiles = tail_profiles(plan, capacity, max_batch_size)
        for graph in manifest.plan(plan.tail).tails.values():
            path, is_narrow = bundle / graph.file, plan.width < least_width
            model = tail_for_tensorrt(path, plan, least_width) if is_narrow else path.read_bytes()
            inputs, outputs = (
                widened(tensors, plan, least_width) for tensors in (graph.inputs, graph.outputs)
            )
            sources.append(Source(graph, model, path, inputs, outputs, profiles, {}))

    def unchanged(graph: Graph, profiles: tuple[Profile, ...]) -> Source:
        path = bundle / graph.file
        return Source(graph, path.read_bytes(), path, graph.inputs, graph.outputs, profiles, {})

    sources.append(unchanged(manifest.logprobs, logprobs_profiles(manifest, max_batch_size)))
    if manifest.processors is not None:
        profiles = processors_profiles(manifest, max_batch_size)
        sources.append(unchanged(manifest.processors, profiles))
    profiles = trunk_profiles(manifest, columns, max_batch_size, least_width, prefill_widths)
    sources.append(trunk_source(bundle / manifest.trunk.file, manifest.trunk, capacity, profiles))
    return sources


def trunk_source(path: Path, graph: Graph, capacity: int, profiles: tuple[Profile, ...]) -> Source:
    """Return the trunk with a static KV capacity of `capacity` tokens, and with the input `columns`
    (see graph.py). graph: its manifest entry."""
    inputs, outputs = (
        tuple(_with_capacity(tensor, capacity) for tensor in tensors)
        for tensors in (graph.inputs, graph.outputs)
    )
    inputs = (*inputs, Tensor(name=COLUMNS, dtype="bool", shape=(COLUMNS,)))
    return Source(
        graph, trunk_for_tensorrt(path, capacity), path, inputs, outputs, profiles, aliases(path)
    )


def _with_capacity(tensor: Tensor, capacity: int) -> Tensor:
    shape = tuple(capacity if size == "capacity" else size for size in tensor.shape)
    return Tensor(name=tensor.name, dtype=tensor.dtype, shape=shape)


def _save(directory: Path, engine: bytes, source: Source, key: str) -> EngineFile:
    entry = EngineFile(
        graph=source.graph.file,
        file=_file_name(source),
        sha256=hashlib.sha256(engine).hexdigest(),
        bytes=len(engine),
        profiles=source.profiles,
        aliases=source.aliases,
    )
    engine_staging.save_engine(directory, engine, entry, key)
    return entry


def _file_name(source: Source) -> str:
    return f"{source.graph.file.removesuffix('.onnx')}.engine"


def _key(source: Source, job: _Job) -> str:
    """Return a short hash of everything that an engine is built from."""
    model = hashlib.sha256(source.model).hexdigest()
    settings = (
        job.manifest.content_hash,
        job.builder.version,
        job.builder.workspace,
        job.targets,
        source.profiles,
    )
    return _digest([model, BUILD_FLAGS_KEY, *map(repr, settings)])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _read_timing_cache(path: Path | None) -> bytes:
    """Return the content of a timing cache; b"" if there is none or its file does not exist yet."""
    if path is None or not path.exists():
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PassError(f"cannot read --timing-cache {path}: {error.strerror}") from None
