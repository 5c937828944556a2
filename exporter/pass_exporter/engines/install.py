"""Collects engines in a partial directory, which an interrupted build leaves to the next, and
installs them atomically."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from pass_exporter.engines.builder import Source
from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import ENGINES_DIRECTORY, FILE_NAME, EngineFile, EngineSet
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.files import locked, write_whole


@contextmanager
def staging(bundle: Path, name: str) -> Iterator[Path]:
    """Yield the partial directory of the engine set `name`, locked, with the engines of an
    interrupted build. Raises PassError if it is locked or cannot be written."""
    directory = bundle / ENGINES_DIRECTORY / f".{name}.partial"
    busy = f"another pass-export build is making the engines {name} of {bundle}; wait for it"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_suffix(".lock"), busy):
            directory.mkdir(exist_ok=True)
            yield directory
    except OSError as error:
        raise PassError(
            f"cannot write {directory}: {error.strerror or error} (is the disk full?)"
        ) from None


def save_engine(directory: Path, engine: bytes, source: Source, key: str) -> EngineFile:
    """Write an engine, and then a .json file that marks it as finished. Return its manifest entry.
    key: a hash of what it was built from."""
    entry = EngineFile(
        graph=source.graph.file,
        file=source.engine_file,
        sha256=hashlib.sha256(engine).hexdigest(),
        bytes=len(engine),
        profiles=source.profiles,
        aliases=source.aliases,
    )
    (directory / entry.file).write_bytes(engine)
    write_whole(directory / f"{entry.file}.{key}.json", entry.model_dump_json())
    return entry


def finished_engine(directory: Path, file: str, key: str) -> EngineFile | None:
    """Return the entry of an engine that a build finished with the same key, or None."""
    try:
        entry = EngineFile.model_validate_json(
            (directory / f"{file}.{key}.json").read_text(encoding="utf-8")
        )
        return entry if file_info(directory / file).sha256 == entry.sha256 else None
    except (OSError, ValidationError):
        return None


def install(bundle: Path, directory: Path, engines: EngineSet) -> None:
    """Move the finished set into the bundle, and list it in place of an older set for the same
    GPUs."""
    engine_files = {engine.file for engine in engines.engines}
    for path in directory.iterdir():  # The .json files, and files of builds with other settings.
        if path.name not in engine_files:
            path.unlink()
    busy = f"another build is changing the manifest of {bundle}"
    with locked(bundle / ENGINES_DIRECTORY / ".manifest.lock", busy, wait_seconds=math.inf):
        destination = engines.path(bundle)
        # The directory's name has a hash of the engines, so these are the same engines, of a build
        # that was interrupted before it listed them.
        if destination.exists():
            shutil.rmtree(destination)
        directory.rename(destination)
        # Read under the lock, because another build may have changed it meanwhile.
        manifest = read_manifest(bundle)
        target = (engines.library, engines.version, engines.targets)
        replaced = [
            other
            for other in manifest.engines
            if (other.library, other.version, other.targets) == target
        ]
        kept = [other for other in manifest.engines if other not in replaced]
        changed = manifest.model_copy(update={"engines": (*kept, engines)})
        write_whole(bundle / FILE_NAME, changed.text())
    for old in replaced:
        if old.directory != engines.directory:
            shutil.rmtree(old.path(bundle), ignore_errors=True)
