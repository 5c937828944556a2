"""Installs engines atomically: they are collected in a partial directory, which is then renamed.

A build that is interrupted leaves the directory, and the next build takes over its engines.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from pass_runtime.bundle.integrity import file_info
from pass_runtime.bundle.manifest import ENGINES_DIRECTORY, FILE_NAME, EngineFile, EngineSet
from pass_runtime.bundle.read import read_manifest
from pass_runtime.errors import PassError
from pass_runtime.files import locked, write_whole


@contextmanager
def staging(bundle: Path, name: str) -> Iterator[Path]:
    """Yield the partial directory of the engine set `name`, with the engines that an interrupted
    build has left there.

    Raises PassError if another build of the same set is running, or if the directory cannot be
    written. The set is locked until the block or the process ends.
    """
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


def save_engine(directory: Path, engine: bytes, entry: EngineFile, key: str) -> None:
    """Write an engine, and then a .json file that marks it as finished. entry: its manifest entry.
    key: a hash of all that the engine was built from."""
    (directory / entry.file).write_bytes(engine)
    write_whole(directory / f"{entry.file}.{key}.json", entry.model_dump_json())


def finished_engine(directory: Path, file: str, key: str) -> EngineFile | None:
    """Return the manifest entry of the engine that a build finished with the same key, or None."""
    try:
        entry = EngineFile.model_validate_json(
            (directory / f"{file}.{key}.json").read_text(encoding="utf-8")
        )
        return entry if file_info(directory / file).sha256 == entry.sha256 else None
    except (OSError, ValidationError):
        return None


def install(bundle: Path, directory: Path, engines: EngineSet) -> None:
    """Move the finished set from the partial `directory` into the bundle, and list it in the
    manifest in place of an older set for the same library, version and GPUs, which is removed."""
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
        replaced = [other for other in manifest.engines if same_target(other, engines)]
        kept = [other for other in manifest.engines if other not in replaced]
        changed = manifest.model_copy(update={"engines": (*kept, engines)})
        write_whole(bundle / FILE_NAME, changed.model_dump_json(indent=2) + "\n")
    for old in replaced:
        if old.directory != engines.directory:
            shutil.rmtree(old.path(bundle), ignore_errors=True)


def same_target(a: EngineSet, b: EngineSet) -> bool:
    """Whether two sets are for the same library, version and GPUs."""
    return (a.library, a.version, a.targets) == (b.library, b.version, b.targets)
