"""Weights in the form that ONNX Runtime's CPU kernels read, in files that all sessions and processes map.

A session folds constants and packs weights when it opens, into memory of its own. ONNX Runtime can write what it made:
the first session over a trunk does so, into the user's cache directory, and later ones map the file. They need not
optimize the graph again, and the weights are in memory once, however many sessions there are.

packed/KEY/ is an entry: a graph, its weights, and a note with their hashes, or with the reason why they cannot be used.
It appears whole, under a lock, after its logits were compared with those of the session that wrote it. Entries of two
graphs over the same weights have one file of them, with two names. Whatever fails, the trunk is opened as if there were
no cache.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort

from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.external_data import AlignedModel
from pass_runtime.backends.ort.packing import GRAPH_FILE, NotUsable, Probe, release_free_memory, pack, weight_key
from pass_runtime.bundle.integrity import Remembered, cache_directory, has_hash
from pass_runtime.bundle.manifest import FileInfo, Manifest
from pass_runtime.errors import PassError
from pass_runtime.files import locked, write_whole

NOTE_FILE = "packed.json"
GROWTH_FACTOR = 2.5
"""An entry is expected to take at most this many times the bytes that the weights have in the bundle: float32 takes
2.2, int4 and int8 1.6. While it is written there are two copies of it."""
RESERVED_BYTES = 1 << 30
"""Bytes of the disk that stay free."""
LOCK_SECONDS = 60.0
"""Seconds to wait for another process that writes the same entry. That takes a few, and whoever does not wait has
memory of its own for the weights for as long as its session is open."""

log = logging.getLogger("pass_runtime.weights")
PACKING = "%s: packing weights for this CPU, which takes some seconds and happens once"


class NotPacked(Exception):
    """Why a trunk is opened without packed weights."""


@dataclass(frozen=True)
class WeightCache:
    """directory: None is packed/ in the user's cache directory. least: smaller weights, in bytes, are not packed, as
    there is little to gain. most: the bytes of all entries; those that were not used for longest are removed."""

    directory: Path | None = None
    min_bytes: int = 32 << 20
    max_bytes: int = 16 << 30

    def open(
        self, bundle: Path, manifest: Manifest, file: str, threads: int, probe: Probe, like: str | None = None
    ) -> ort.InferenceSession | None:
        """A session with packed weights over the bundle's trunk `file` on the CPU. None where it has to be opened
        without. like: another trunk of the bundle, which was opened before and has all weights of this one."""
        try:
            entry, size = self._entry(bundle, manifest, file)
            other = None if like is None else self._entry(bundle, manifest, like)[0]
            session = _open_entry(entry, threads)
            if session is None:
                entry.parent.mkdir(parents=True, exist_ok=True)
                with _lock(entry, LOCK_SECONDS):
                    session = _open_entry(entry, threads)
                    session = session or self._write(bundle / file, entry, size, threads, probe, other)
        except (NotPacked, PassError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: there is no home
            log.info("%s: weights are not packed: %s", file, error)
            return None
        release_free_memory()
        log.info("%s: weights are mapped from %s", file, entry)
        return session

    def has(self, bundle: Path, manifest: Manifest, file: str) -> bool:
        """Whether there is an entry for the bundle's trunk `file`."""
        try:
            return bool(_read(self._entry(bundle, manifest, file)[0]).files)
        except (NotPacked, PassError, OSError, RuntimeError):
            return False

    def _entry(self, bundle: Path, manifest: Manifest, file: str) -> tuple[Path, int]:
        """The directory of a trunk's entry, and the size of its weights in the bundle."""
        data = f"{manifest.trunk.file}.data"
        size = manifest.files[data].bytes if data in manifest.files else 0
        if size < self.min_bytes:
            raise NotPacked(f"they are only {size >> 20} MiB")
        if size * GROWTH_FACTOR > self.max_bytes:
            raise NotPacked(f"they could take more than the {self.max_bytes >> 20} MiB of the cache")
        remembered, hashes = Remembered(), [manifest.files[name].sha256 for name in (file, data)]
        for name, sha256 in zip((file, data), hashes, strict=True):
            if not remembered.knows(bundle / name, sha256):
                raise NotPacked(f"the content of {name} is not known yet")
        key = weight_key(*hashes)
        if key is None:
            raise NotPacked("the kind of CPU is not known")
        return (self.directory or cache_directory() / "packed") / key, size

    def _write(
        self, trunk: Path, entry: Path, size: int, threads: int, probe: Probe, other: Path | None
    ) -> ort.InferenceSession:
        """Make an entry, whose lock is held, and return a session over it. other: of another graph over the weights."""
        part = _part(entry)
        _remove(entry)
        shutil.rmtree(part, ignore_errors=True)
        self._make_room(entry.parent, size)
        part.mkdir()
        try:
            begun = time.monotonic()
            if other is None:
                log.info(PACKING, trunk)
            try:
                session, made = pack(trunk, part, threads, probe, None if other is None else _read_like(other))
            except NotUsable as error:
                log.warning("%s: weights cannot be used packed: %s", trunk, error)
                shutil.rmtree(part)
                part.mkdir()
                write_whole(part / NOTE_FILE, json.dumps({"trunk": str(trunk), "unusable": str(error)}))
                part.rename(entry)
                raise NotPacked(str(error)) from None
            files = {name: info.model_dump() for name, info in made.files.items()}
            write_whole(part / NOTE_FILE, json.dumps({"trunk": str(trunk), "files": files, "blobs": dict(made.blobs)}))
            part.rename(entry)
            log.info("%s: weights were packed in %.1f s", trunk, time.monotonic() - begun)
            return session
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, directory: Path, size: int) -> None:
        """Remove what killed processes left, and entries until another one fits. NotPacked where the disk is full."""
        for part in directory.glob("*.part"):
            with suppress(OSError, PassError), _lock(part.with_suffix(""), 0):
                shutil.rmtree(part)
        entries = [path for path in directory.iterdir() if (path / NOTE_FILE).exists()]
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in entries}
        for path in sorted(entries, key=lambda path: path.stat().st_mtime_ns):
            if sum(sizes.values()) + size * GROWTH_FACTOR > self.max_bytes:
                _remove(path)
                del sizes[path]
        if shutil.disk_usage(directory).free < 2 * GROWTH_FACTOR * size + RESERVED_BYTES:
            raise NotPacked(f"there is too little room in {directory}")


def _read(entry: Path) -> AlignedModel:
    """What an entry's note says. FileNotFoundError where there is none; without files where it is damaged."""
    try:
        note = json.loads((entry / NOTE_FILE).read_text(encoding="utf-8"))
        if "unusable" in note:
            raise NotPacked(note["unusable"])
        return AlignedModel({name: FileInfo(**info) for name, info in note["files"].items()}, dict(note["blobs"]))
    except (ValueError, TypeError, KeyError, AttributeError):
        return AlignedModel({}, {})


def _read_like(entry: Path) -> tuple[Path, AlignedModel] | None:
    """An entry that another one may have its weights from."""
    try:
        return entry, _read(entry)
    except (FileNotFoundError, NotPacked):
        return None


def _open_entry(entry: Path, threads: int) -> ort.InferenceSession | None:
    """A session over an entry; None where there is none, or a damaged one."""
    try:
        files = _read(entry).files
    except FileNotFoundError:
        return None
    if not _intact(entry, files):
        log.warning("packed weights in %s are damaged, and are packed again", entry)
        return None
    with suppress(OSError):  # of another user
        os.utime(entry)
    return open_session(entry / GRAPH_FILE, "cpu", threads, packed=True)


def _intact(entry: Path, files: Mapping[str, FileInfo]) -> bool:
    remembered = Remembered()
    try:
        good = all(
            (entry / name).stat().st_size == info.bytes and has_hash(entry / name, info.sha256, remembered)
            for name, info in files.items()
        )
    except OSError:
        return False
    remembered.save()
    return good and GRAPH_FILE in files


def _remove(entry: Path) -> None:
    """Remove an entry, its note first. Sessions that have mapped its files keep them."""
    (entry / NOTE_FILE).unlink(missing_ok=True)
    shutil.rmtree(entry, ignore_errors=True)


def _part(entry: Path) -> Path:
    """Where an entry is while it is written."""
    return entry.with_name(f"{entry.name}.part")


def _lock(entry: Path, wait_seconds: float) -> AbstractContextManager[None]:
    """Hold the lock of an entry. Raises PassError if another process still holds it after so many seconds."""
    return locked(entry.with_name(f"{entry.name}.lock"), "another process is packing them", wait_seconds=wait_seconds)
