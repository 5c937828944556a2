"""Installs engines atomically: they are collected in a partial directory, which is then renamed."""

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
    """Yield the directory in which the engines of the set `name` are collected. A build can be
    resumed.

    A lock, which ends with the process, admits one build at a time.
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
    """Write a finished engine, then the .json file that marks it finished. key: of its sources."""
    (directory / entry.file).write_bytes(engine)
    write_whole(directory / f"{entry.file}.{key}.json", entry.model_dump_json())


def finished_engine(directory: Path, file: str, key: str) -> EngineFile | None:
    """Return the engine that an earlier build finished with the same key, or None."""
    try:
        entry = EngineFile.model_validate_json(
            (directory / f"{file}.{key}.json").read_text(encoding="utf-8")
        )
        return entry if file_info(directory / file).sha256 == entry.sha256 else None
    except (OSError, ValidationError):
        return None


def install(bundle: Path, directory: Path, engines: EngineSet) -> None:
    """Move the finished set into the bundle, list it in the manifest, and remove the old one."""
    listed = {engine.file for engine in engines.engines}
    for path in directory.iterdir():  # The .json files, and files of builds with other settings.
        if path.name not in listed:
            path.unlink()
    busy = f"another build is changing the manifest of {bundle}"
    with locked(bundle / ENGINES_DIRECTORY / ".manifest.lock", busy, wait_seconds=math.inf):
        destination = engines.path(bundle)
        # The same engines, of a build that was interrupted before it listed them.
        if destination.exists():
            shutil.rmtree(destination)
        directory.rename(destination)
        # Read again, because another build may have changed it meanwhile.
        manifest = read_manifest(bundle)
        replaced = [known for known in manifest.engines if same_target(known, engines)]
        others = [known for known in manifest.engines if known not in replaced]
        changed = manifest.model_copy(update={"engines": (*others, engines)})
        write_whole(bundle / FILE_NAME, changed.model_dump_json(indent=2) + "\n")
    for known in replaced:
        if known.directory != engines.directory:
            shutil.rmtree(known.path(bundle), ignore_errors=True)


def same_target(a: EngineSet, b: EngineSet) -> bool:
    """Whether two sets are for the same library, version and GPUs."""
    return (a.library, a.version, a.targets) == (b.library, b.version, b.targets)
