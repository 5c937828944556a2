"""Checks that the files of a bundle are the ones that were exported, by their sizes and SHA-256.

Reading a large model takes long, so the hashes of files that were read are cached in the user's
cache directory. A cached hash belongs to a file with the same device, inode, size, mtime and ctime.
A changed file has another ctime, which no program can set back, unlike the mtime. The hash of a
file that changed a moment ago is not cached, because a second change within the same tick of the
file system's clock would not change the times.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pass_runtime.bundle.manifest import (
    CHAT_TEMPLATE_FILES,
    FILE_NAME,
    TOKENIZER_FILE,
    FileInfo,
    Manifest,
)
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

HASHES_FILE = "hashes.txt"
"""The cache: a text file whose lines have the numbers that identify a file, and its SHA-256."""
MAX_CACHED_HASHES = 4096
"""The most lines of HASHES_FILE; older ones are dropped."""
MIN_AGE_NS = 2 * 10**9
"""A hash is cached only if its file did not change for this long, more than a tick of the clock."""


def cache_directory() -> Path:
    """Return the directory that PASS_CACHE names, or else pass-toolkit in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PASS_CACHE") or Path(base) / "pass-toolkit")


class HashCache:
    """The SHA-256 hashes of HASHES_FILE, which is read once; no hashes if it cannot be read."""

    def __init__(self) -> None:
        self._cached: dict[str, str] = {}
        self._new: dict[str, str] = {}
        # no file, no home directory, or a file that is not text
        with suppress(OSError, RuntimeError, ValueError):
            for line in (cache_directory() / HASHES_FILE).read_text(encoding="ascii").splitlines():
                identity, _, sha256 = line.rpartition(" ")
                self._cached[identity] = sha256

    def matches(self, path: Path, sha256: str, compute: Callable[[Path], str]) -> bool:
        """Whether the file `path` has this hash. compute: reads a file and returns its hash; called
        unless the cache has this hash for the file."""
        identity = _identity(path)
        if self._cached.get(identity) == sha256:
            return True
        actual = compute(path)
        status = path.stat()
        age_ns = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns)
        if identity == _identity(path) and age_ns > MIN_AGE_NS:  # It did not change meanwhile.
            self._new[identity] = actual
        return actual == sha256

    def save(self) -> None:
        """Add the new hashes to HASHES_FILE, which other processes may have changed meanwhile."""
        if not self._new:
            return
        merged = HashCache()._cached | self._new
        newest = [*merged.items()][-MAX_CACHED_HASHES:]
        lines = [f"{identity} {sha256}\n" for identity, sha256 in newest]
        with suppress(OSError, RuntimeError, PassError):  # The next check reads the files again.
            cache_directory().mkdir(parents=True, exist_ok=True)
            write_whole(cache_directory() / HASHES_FILE, "".join(lines))


def identities(bundle: Path) -> dict[str, str]:
    """Return what identifies the present content of each file of the directory: name -> numbers
    that change with it. A directory that cannot be read has no files."""
    found = {}
    with suppress(OSError):
        for path in bundle.iterdir():
            with suppress(OSError):  # a link to nothing
                found[path.name] = _identity(path)
    return found


def _identity(path: Path) -> str:
    status = path.stat()
    return (
        f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} "
        f"{status.st_ctime_ns}"
    )


def verify_files(
    bundle: Path, manifest: Manifest, *, hashes: bool = True, hash_cache: HashCache | None = None
) -> None:
    """Raise PassError unless the manifest lists every file that is used, and each file in the list
    exists as it was exported.

    hashes: whether to compare hashes, and not sizes only. hash_cache: None reads every file.
    """
    for name, info in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise PassError(f"{path} is missing; export the bundle again")
        if path.stat().st_size != info.bytes:
            raise PassError(
                f"{path} has {path.stat().st_size} bytes instead of {info.bytes}; copy or "
                "export the bundle again"
            )
        if hashes and not has_hash(path, info.sha256, hash_cache):
            raise PassError(
                f"{path} does not match its SHA-256 in {FILE_NAME}; copy or export the bundle again"
            )
    used = {TOKENIZER_FILE, *(graph.file for graph in manifest.graphs)}
    used |= {derived.file for derived in manifest.derived}
    trunk = manifest.trunk.file
    if manifest.derived and not (bundle / trunk).exists():  # an export for the CPU alone
        used.remove(trunk)
    used |= {file for file in CHAT_TEMPLATE_FILES.values() if (bundle / file).exists()}
    if missing := sorted(used - set(manifest.files)):
        raise PassError(f"{bundle / FILE_NAME}: {missing[0]} is used but not listed under files")


def has_hash(path: Path, sha256: str, hash_cache: HashCache | None = None) -> bool:
    """Whether a file has this hash. The file is read unless `hash_cache` has this hash for it."""
    if hash_cache is not None:
        return hash_cache.matches(path, sha256, _sha256)
    return _sha256(path) == sha256


def _sha256(path: Path) -> str:
    return file_info(path).sha256


def file_info(path: Path, progress: Callable[[int], None] | None = None) -> FileInfo:
    """Return the size and SHA-256 of a file. progress: called with the bytes of each piece read."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            if progress is not None:
                progress(len(piece))
    return FileInfo(sha256=digest.hexdigest(), bytes=size)
