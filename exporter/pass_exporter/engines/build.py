"""Builds all engines of a bundle, the trunk last, and lists them in the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pass_exporter.config import EngineConfig
from pass_exporter.engines.builder import EngineBuilder, Source
from pass_exporter.engines.install import finished_engine, install, save_engine, staging
from pass_exporter.engines.memory import MemoryEstimate, check_fits, estimate
from pass_exporter.engines.profiles import (
    column_steps,
    engine_windows,
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
from pass_exporter.engines.tensorrt_graphs import (
    aliases,
    tail_for_tensorrt,
    trunk_for_tensorrt,
)
from pass_exporter.progress import Progress
from pass_runtime.backends.cuda import find_device, why_no_device
from pass_runtime.backends.trt.library import find_library, import_library
from pass_runtime.bundle.integrity import verify_files
from pass_runtime.bundle.manifest import (
    EngineFile,
    EngineSet,
    Manifest,
)
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

if TYPE_CHECKING:
    from pass_exporter.engines.compare import Comparison

BUILD_FLAGS_KEY = "user allocation"
"""Names the flags of `EngineBuilder` in `_key`: change both, or a build takes over engines with
others."""


@dataclass(frozen=True)
class BuildReport:
    """memory: what decoding needs. resumed: engines of an interrupted build. comparisons: by
    window, () if the engines were not compared."""

    engines: EngineSet
    memory: MemoryEstimate
    resumed: int
    comparisons: tuple[Comparison, ...]

    @property
    def bytes(self) -> int:
        return sum(engine.bytes for engine in self.engines.engines)


def build_engines(bundle: Path, config: EngineConfig, progress: Progress) -> BuildReport:
    """Build all engines and install them in `bundle`. Raises PassError if a setting is invalid or a
    build fails, or after the installation if `config.verify` finds other logits."""
    progress.phase("checking the bundle")
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
    batch = config.max_batch_size
    sources = graph_sources(bundle, manifest, columns, batch, library.least_width, widths)
    workspace = None if config.workspace is None else config.workspace << 20
    profiles = sources[-1].profiles
    memory = estimate(bundle, manifest, profiles, columns[-1], batch, workspace or 0)
    check_fits(memory, available_memory(config.device_memory, device), columns[-1])
    built_for = targets if library.builds_ahead else ()
    cache = _read_timing_cache(config.timing_cache)
    builder = EngineBuilder(library, built_for, workspace, cache)
    name = "-".join([library.name, builder.version, *targets])
    existing = {(engines.library, engines.version, engines.targets) for engines in manifest.engines}
    if (library.name, builder.version, targets) in existing and not config.force:
        raise PassError(f"{bundle} has engines {name} already; use --force to build them again")
    settings = (manifest.content_hash, builder.version, workspace, targets)
    with staging(bundle, name) as directory:
        files: list[EngineFile] = []
        resumed, tails = 0, len(sources) - 1
        tail_step = progress.phase(f"building {tails} tails")
        for index, source in enumerate(sources):
            # A tail counts as one step.
            step = progress.phase("building the trunk") if index == tails else lambda *_: None
            model = hashlib.sha256(source.model).hexdigest()
            key = _digest([model, BUILD_FLAGS_KEY, *map(repr, (*settings, source.profiles))])
            file = finished_engine(directory, source.engine_file, key)
            resumed += file is not None
            if file is None:
                file = save_engine(directory, builder.build(source, step), source, key)
                if config.timing_cache is not None:
                    write_whole(config.timing_cache, builder.timing_cache)
            files.append(file)
            if index < tails:
                tail_step(index + 1, tails)
        engines = EngineSet(
            directory=f"{name}-{_digest(file.sha256 for file in files)}",
            library=library.name,
            version=builder.version,
            targets=targets,
            bundle=manifest.content_hash,
            lookahead=manifest.lookahead.length,
            max_batch_size=batch,
            capacities=columns,
            prefill_widths=widths,
            engines=tuple(files),
        )
        progress.phase("writing the manifest")
        install(bundle, directory, engines)
    comparisons: list[Comparison] = []
    if config.verify:
        from pass_exporter.engines.compare import compare_engines

        progress.phase("comparing with ONNX Runtime")
        comparisons = compare_engines(bundle, config.engine)
    return BuildReport(engines, memory, resumed, tuple(comparisons))


def graph_sources(
    bundle: Path,
    manifest: Manifest,
    columns: Sequence[int],
    max_batch_size: int = 1,
    least_width: int = 1,
    prefill_widths: Sequence[int] | None = None,
) -> list[Source]:
    """Return the graphs of the windows of `engine_windows`, the trunk last: a tail fails sooner.
    columns, least_width, prefill_widths: as for `trunk_profiles`."""
    sources, capacity = [], columns[-1]
    for window in engine_windows(manifest):
        profiles = tail_profiles(window, capacity, max_batch_size)
        for graph in manifest.window(window.tail).tails.values():
            path = bundle / graph.file
            model = tail_for_tensorrt(path, window, least_width)
            sources.append(Source(graph, model, path, profiles))
    for graph, profiles in (
        (manifest.logprobs, logprobs_profiles(manifest, max_batch_size)),
        (manifest.processors, processors_profiles(manifest, max_batch_size)),
    ):
        path = bundle / graph.file
        sources.append(Source(graph, path.read_bytes(), path, profiles))
    profiles = trunk_profiles(manifest, columns, max_batch_size, least_width, prefill_widths)
    path = bundle / manifest.trunk.file
    model = trunk_for_tensorrt(path, capacity)
    sources.append(Source(manifest.trunk, model, path, profiles, aliases(path)))
    return sources


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _read_timing_cache(path: Path | None) -> bytes:
    if path is None or not path.exists():
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise PassError(f"cannot read --timing-cache {path}: {error.strerror}") from None
