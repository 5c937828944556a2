"""Engines for a bundle that exists: tails, then the trunk, then the manifest that lists them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pass_exporter import engine_staging
from pass_exporter.config import EngineConfig
from pass_exporter.engine_builder import EngineBuilder, Source
from pass_exporter.engine_compare import Comparison, compare_engines
from pass_exporter.engine_graph import COLUMNS, aliases, trunk_for_tensorrt
from pass_exporter.engine_memory import MemoryEstimate, check_fits, estimate
from pass_exporter.engine_profiles import column_steps, engine_plans, tail_profiles, trunk_profiles
from pass_exporter.engine_target import available_memory, check_dtype, choose_capacity, choose_targets
from pass_exporter.progress import Progress
from pass_runtime.cuda import find_device
from pass_runtime.errors import PassError
from pass_runtime.manifest import (
    EngineFile,
    EngineSet,
    Manifest,
    Tensor,
    read_manifest,
    verify_files,
)
from pass_runtime.trt_library import flavour, import_library


@dataclass(frozen=True)
class BuildReport:
    """resumed: engines that an earlier, interrupted build had finished. comparisons: by plan, where asked for."""

    engines: EngineSet
    memory: MemoryEstimate
    resumed: int
    comparisons: tuple[Comparison, ...]

    @property
    def bytes(self) -> int:
        return sum(engine.bytes for engine in self.engines.engines)


def build_engines(bundle: Path, config: EngineConfig, progress: Progress) -> BuildReport:
    """Build every graph of `bundle`. Raises PassError and leaves the bundle as it was where anything is wrong."""
    progress.phase("checking the bundle")
    manifest = read_manifest(bundle)
    verify_files(bundle, manifest)
    chosen, device = flavour(config.engine), find_device()
    import_library(chosen)
    targets = choose_targets(chosen, config, device)
    if chosen.builds_ahead:
        check_dtype(manifest, targets)
    if config.timing_cache is not None and not chosen.timing_cache:
        raise PassError(f"{chosen.name} keeps no timing cache; leave out --timing-cache")
    columns = column_steps(choose_capacity(config, manifest))
    sources = graph_sources(bundle, manifest, columns, config.max_batch_size, chosen.least_width)
    if config.verify and device is None:
        raise PassError("--verify runs the engines and no GPU is visible; build without it, or where the GPU is")
    workspace = None if config.workspace is None else config.workspace << 20
    memory = estimate(bundle, manifest, sources[-1].profiles, columns[-1], config.max_batch_size, workspace or 0)
    check_fits(memory, available_memory(config, device), columns[-1])
    builder = EngineBuilder(chosen, targets if chosen.builds_ahead else (), workspace, _read(config.timing_cache))
    name = "-".join([chosen.name, builder.version, *targets])
    wanted = (chosen.name, builder.version, targets)
    if not config.force and any((e.flavour, e.version, e.targets) == wanted for e in manifest.engines):
        raise PassError(f"{bundle} has engines {name} already; use --force to build them again")
    with engine_staging.staging(bundle, name) as directory:
        files, resumed, tails = [], 0, len(sources) - 1
        step = progress.phase(f"building {tails} tails")
        for index, source in enumerate(sources):
            key = _key(source, builder, targets, manifest)
            file = engine_staging.kept(directory, _file_name(source), key)
            resumed += file is not None
            if index == tails:
                step = progress.phase("building the trunk")
            if file is None:
                engine = builder.build(source, step if index == tails else _unreported)
                file = _keep(directory, engine, source, key)
                _write_cache(config.timing_cache, builder.timing_cache)
            if index < tails:
                step(index + 1, tails)
            files.append(file)
        engines = EngineSet(
            directory=f"{name}-{_digest(file.sha256 for file in files)}",
            flavour=chosen.name,
            version=builder.version,
            targets=targets,
            bundle=manifest.content,
            lookahead=manifest.lookahead.length,
            max_batch_size=config.max_batch_size,
            capacities=columns,
            engines=tuple(files),
        )
        progress.phase("writing the manifest")
        engine_staging.install(bundle, directory, engines)
    comparisons: list[Comparison] = []
    if config.verify:
        progress.phase("comparing with ONNX Runtime")
        comparisons = compare_engines(bundle, chosen.name)
    return BuildReport(engines, memory, resumed, tuple(comparisons))


def graph_sources(
    bundle: Path, manifest: Manifest, columns: Sequence[int], max_batch_size: int = 1, least_width: int = 1
) -> list[Source]:
    """The graphs that engine plans need: tails first, which fail within seconds where a library is too old."""
    sources, capacity = [], columns[-1]
    for plan in engine_plans(manifest):
        profiles = tail_profiles(plan, capacity, max_batch_size)
        for graph in manifest.plan(plan.tail).tails.values():
            path = bundle / graph.file
            sources.append(Source(graph, path.read_bytes(), path, graph.inputs, graph.outputs, profiles, {}))
    graph, path = manifest.trunk, bundle / manifest.trunk.file
    inputs, outputs = ([_fixed(tensor, capacity) for tensor in tensors] for tensors in (graph.inputs, graph.outputs))
    inputs.append(Tensor(name=COLUMNS, dtype="bool", shape=(COLUMNS,)))
    profiles = trunk_profiles(manifest, columns, max_batch_size, least_width)
    model = trunk_for_tensorrt(path, capacity)
    sources.append(Source(graph, model, path, tuple(inputs), tuple(outputs), profiles, aliases(path)))
    return sources


def _fixed(tensor: Tensor, capacity: int) -> Tensor:
    shape = tuple(capacity if size == "capacity" else size for size in tensor.shape)
    return Tensor(name=tensor.name, dtype=tensor.dtype, shape=shape)


def _unreported(_done: int, _steps: int) -> None:
    """A tail is one step of its phase."""


def _keep(directory: Path, engine: bytes, source: Source, key: str) -> EngineFile:
    entry = EngineFile(
        graph=source.graph.file,
        file=_file_name(source),
        sha256=hashlib.sha256(engine).hexdigest(),
        bytes=len(engine),
        profiles=source.profiles,
        aliases=source.aliases,
    )
    engine_staging.keep(directory, engine, entry, key)
    return entry


def _write_cache(path: Path | None, cache: bytes) -> None:
    if path is not None:
        unfinished = path.with_name(f".{path.name}.partial")
        unfinished.write_bytes(cache)
        unfinished.replace(path)


def _file_name(source: Source) -> str:
    return f"{source.graph.file.removesuffix('.onnx')}.engine"


def _key(source: Source, builder: EngineBuilder, targets: Sequence[str], manifest: Manifest) -> str:
    """Short hash of all that goes into an engine."""
    model = hashlib.sha256(source.model).hexdigest()
    settings = (manifest.content, builder.version, builder.workspace, targets, source.profiles)
    return _digest([model, *map(repr, settings)])


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _read(path: Path | None) -> bytes:
    """A timing cache, empty where there is none yet."""
    if path is None or not path.exists():
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PassError(f"cannot read --timing-cache {path}: {error.strerror}") from None
