"""Packed weights, as ONNX Runtime's CPU kernels read them, in files that all processes map.

Without this cache, every session optimizes its graph and packs its weights into memory of its own.
With it, the first session of a trunk writes the results to the user's cache directory, and later
sessions map them: they open faster, and share one copy of the weights in memory.

An entry of the cache is a directory packed/KEY/ with a graph, its weights, and a note, which has
the hashes of both files, or the reason why the weights cannot be used. An entry is renamed into
place under a lock, after its logits were compared with those of the session that wrote it. The
entries of two graphs over the same weights link to one file of weights. If anything fails, the
trunk is opened without the cache.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnxruntime as ort

from pass_runtime.backends.ort.engine import open_session
from pass_runtime.backends.ort.external_data import AlignedModel
from pass_runtime.backends.ort.kernels import find_kernels
from pass_runtime.backends.ort.packing import (
    GRAPH_FILE,
    NotUsable,
    Probe,
    pack,
    release_free_memory,
    weight_key,
)
from pass_runtime.bundle.integrity import HashCache, cache_directory, has_hash
from pass_runtime.bundle.manifest import FileInfo, Manifest
from pass_runtime.errors import PassError
from pass_runtime.files import locked, write_whole

NOTE_FILE = "packed.json"
GROWTH_FACTOR = 2.5
"""An entry takes at most this many times the bytes of the weights in the bundle: float32 takes 2.2,
int4 and int8 1.6. While an entry is written there are two copies of it."""
RESERVED_BYTES = 1 << 30
"""How much of the disk must stay free."""
LOCK_SECONDS = 60.0
"""How long to wait for another process that writes the same entry. After that a session gets its
own copy of the weights."""

log = logging.getLogger("pass_runtime.weights")
PACKING = "%s: packing weights for this CPU, which takes some seconds and happens once"
"""What is logged with a trunk's path before weights are packed; commands print it."""

Pack = Callable[..., tuple[ort.InferenceSession, AlignedModel]]


class NotPacked(Exception):
    """A trunk has to be opened without packed weights this time."""


@dataclass(frozen=True)
class WeightCache:
    """A cache of packed weights. directory: None is packed/ in the user's cache directory.
    min_bytes: smaller weights are not packed, because that gains little. max_bytes: if all entries
    together would be larger, the least recently used ones are removed."""

    directory: Path | None = None
    min_bytes: int = 32 << 20
    max_bytes: int = 16 << 30

    def open(
        self,
        bundle: Path,
        manifest: Manifest,
        file: str,
        threads: int,
        probe: Probe,
        other: str | None = None,
        *,
        unsigned: bool = False,
    ) -> ort.InferenceSession | None:
        """Open the bundle's trunk `file` on the CPU with packed weights, which are packed if there
        is no entry. Return None if they cannot be used. other: another trunk of the bundle that was
        opened before and reads all weights of this one. probe, unsigned: as for `pack`."""
        try:
            entry, size = self._entry(bundle, manifest, file)
            other_entry = None if other is None else self._entry(bundle, manifest, other)[0]
            session = _open_entry(entry, threads)
            if session is None:
                entry.parent.mkdir(parents=True, exist_ok=True)
                with _lock(entry, LOCK_SECONDS):
                    session = _open_entry(entry, threads)  # Another process may have written it.
                    if session is None:
                        make = partial(
                            pack, bundle / file, threads=threads, probe=probe, unsigned=unsigned
                        )
                        session = self._write(bundle / file, entry, size, make, other_entry)
        # A RuntimeError means that there is no home directory.
        except (NotPacked, PassError, OSError, MemoryError, RuntimeError) as error:
            log.info("%s: weights are not packed: %s", file, error)
            return None
        release_free_memory()
        log.info("%s: weights are mapped from %s", file, entry)
        return session

    def has(self, bundle: Path, manifest: Manifest, file: str) -> bool:
        """Whether the bundle's trunk `file` has an entry that can be used."""
        try:
            return bool(_read(self._entry(bundle, manifest, file)[0]).files)
        except (NotPacked, PassError, OSError, RuntimeError):
            return False

    def _entry(self, bundle: Path, manifest: Manifest, file: str) -> tuple[Path, int]:
        """Return the directory of a trunk's entry, and the bytes of its weights in the bundle.
        Raises NotPacked if the weights are not to be packed."""
        data = f"{manifest.trunk.file}.data"
        size = manifest.files[data].bytes if data in manifest.files else 0
        if size < self.min_bytes:
            raise NotPacked(f"they are only {size >> 20} MiB")
        if size * GROWTH_FACTOR > self.max_bytes:
            raise NotPacked(
                f"they could take more than the {self.max_bytes >> 20} MiB of the cache"
            )
        hash_cache = HashCache()
        hashes = {name: manifest.files[name].sha256 for name in (file, data)}
        for name, sha256 in hashes.items():
            # The key must be that of the files themselves, which may differ from the manifest's.
            if not hash_cache.knows(bundle / name, sha256):
                raise NotPacked(f"the hash of {name} is not known yet")
        key = weight_key(hashes[file], hashes[data], find_kernels(manifest))
        if key is None:
            raise NotPacked("the kind of CPU is not known")
        return (self.directory or cache_directory() / "packed") / key, size

    def _write(
        self, trunk: Path, entry: Path, size: int, make: Pack, other: Path | None
    ) -> ort.InferenceSession:
        """Make an entry, whose lock the caller holds, and return a session of it. size: the bytes
        of the weights in the bundle. make: `pack` for `trunk`. other: the other graph's entry."""
        part = _part(entry)
        _remove(entry)
        shutil.rmtree(part, ignore_errors=True)
        self._make_room(entry.parent, size)
        part.mkdir()
        try:
            started = time.monotonic()
            if other is None:
                log.info(PACKING, trunk)
            try:
                session, packed = make(part, other=None if other is None else _read_other(other))
            except NotUsable as error:
                log.warning("%s: weights cannot be used packed: %s", trunk, error)
                shutil.rmtree(part)
                part.mkdir()
                write_whole(
                    part / NOTE_FILE, json.dumps({"trunk": str(trunk), "unusable": str(error)})
                )
                part.rename(entry)
                raise NotPacked(str(error)) from None
            files = {name: info.model_dump() for name, info in packed.files.items()}
            write_whole(
                part / NOTE_FILE,
                json.dumps({"trunk": str(trunk), "files": files, "blobs": dict(packed.blobs)}),
            )
            part.rename(entry)
            log.info("%s: weights were packed in %.1f s", trunk, time.monotonic() - started)
            return session
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, directory: Path, size: int) -> None:
        """Remove what processes that were killed left, and the least recently used entries until
        an entry fits for weights of `size` bytes. Raises NotPacked if the disk is too full."""
        for part in directory.glob("*.part"):
            # The lock is free if the process that wrote this has ended.
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
    """Read an entry's note. The result has no files if the note is damaged. Raises
    FileNotFoundError if there is no note, and NotPacked if it says that weights cannot be used."""
    try:
        note = json.loads((entry / NOTE_FILE).read_text(encoding="utf-8"))
        if "unusable" in note:
            raise NotPacked(note["unusable"])
        return AlignedModel(
            {name: FileInfo(**info) for name, info in note["files"].items()}, dict(note["blobs"])
        )
    except (ValueError, TypeError, KeyError, AttributeError):
        return AlignedModel({}, {})


def _read_other(entry: Path) -> tuple[Path, AlignedModel] | None:
    """Return the `other` of `pack`: the entry to link to; None if it cannot be used."""
    try:
        return entry, _read(entry)
    except (FileNotFoundError, NotPacked):
        return None


def _open_entry(entry: Path, threads: int) -> ort.InferenceSession | None:
    """Open a session of an entry. Return None if there is no entry, or it is damaged."""
    try:
        files = _read(entry).files
    except FileNotFoundError:
        return None
    if not _intact(entry, files):
        log.warning("packed weights in %s are damaged, and are packed again", entry)
        return None
    with suppress(OSError):  # The entry may belong to another user.
        os.utime(entry)  # It is now the most recently used one.
    return open_session(entry / GRAPH_FILE, "cpu", threads, packed=True)


def _intact(entry: Path, files: Mapping[str, FileInfo]) -> bool:
    """Whether the files of an entry are those that its note describes."""
    hash_cache = HashCache()
    try:
        unchanged = all(
            (entry / name).stat().st_size == info.bytes
            and has_hash(entry / name, info.sha256, hash_cache)
            for name, info in files.items()
        )
    except OSError:
        return False
    hash_cache.save()
    return unchanged and GRAPH_FILE in files


def _remove(entry: Path) -> None:
    """Remove an entry, its note first, so that no process opens it. Mapped files stay readable."""
    (entry / NOTE_FILE).unlink(missing_ok=True)
    shutil.rmtree(entry, ignore_errors=True)


def _part(entry: Path) -> Path:
    """Return the directory in which an entry is written before it is renamed."""
    return entry.with_name(f"{entry.name}.part")


def _lock(entry: Path, wait_seconds: float) -> AbstractContextManager[None]:
    """Hold an entry's lock. Raises PassError if a process still holds it after `wait_seconds`."""
    lock = entry.with_name(f"{entry.name}.lock")
    return locked(lock, "another process is packing them", wait_seconds=wait_seconds)
