"""Engine files for the fake TensorRT (`fake_tensorrt.py`), from the graphs that the exporter would
give to the real one."""

from __future__ import annotations

import json
from pathlib import Path

from fake_tensorrt import VERSION

from pass_exporter.engines.build import graph_sources
from pass_exporter.engines.builder import Source
from pass_exporter.engines.profiles import column_steps, default_prefill_widths
from pass_runtime.backends.trt.library import LibraryName
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import FILE_NAME, EngineFile, EngineSet, Manifest
from pass_runtime.bundle.read import read_manifest


def add_fake_engines(
    bundle: Path,
    capacity: int,
    least_width: int = 1,
    max_batch_size: int = 1,
    library: LibraryName = "tensorrt",
) -> Manifest:
    manifest = read_manifest(bundle)
    columns = column_steps(capacity)
    engines = EngineSet(
        directory="fake",
        library=library,
        version=VERSION,
        targets=("sm90",),
        bundle=manifest.content_hash,
        lookahead=manifest.lookahead.length,
        max_batch_size=max_batch_size,
        capacities=columns,
        prefill_widths=default_prefill_widths(manifest, columns),
        engines=(),
    )
    directory = engines.path(bundle)
    directory.mkdir(parents=True)
    sources = graph_sources(bundle, manifest, columns, max_batch_size, least_width)
    files = tuple(_write_plan(bundle, directory, source) for source in sources)
    manifest = manifest.model_copy(
        update={"engines": (engines.model_copy(update={"engines": files}),)}
    )
    (bundle / FILE_NAME).write_text(manifest.text(), encoding="utf-8")
    return manifest


def _write_plan(bundle: Path, directory: Path, source: Source) -> EngineFile:
    path = bundle / f".{source.graph.file}"  # in this folder, where it finds its external data
    path.write_bytes(source.model)
    plan = {
        "onnx": str(path),
        "profiles": [profile.sizes for profile in source.profiles],
        "aliases": source.aliases,
        "inputs": {t.name: {"dtype": t.dtype, "shape": t.shape} for t in source.inputs},
        "outputs": {t.name: {"dtype": t.dtype, "shape": t.shape} for t in source.outputs},
    }
    engine = directory / f"{source.graph.file}.engine"
    engine.write_text(json.dumps(plan), encoding="utf-8")
    info = file_info(engine)
    return EngineFile(
        graph=source.graph.file,
        file=engine.name,
        sha256=info.sha256,
        bytes=info.bytes,
        profiles=source.profiles,
        aliases=source.aliases,
    )
