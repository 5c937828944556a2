"""Checks a bundle's files against the sizes and SHA-256 of the export."""

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
"""Its lines have the numbers that identify a file, and its SHA-256."""
MAX_CACHED_HASHES = 4096
MIN_AGE_NS = 2 * 10**9
"""More than a tick of the clock: younger files may change again."""


def cache_directory() -> Path:
    """PASS_CACHE, or pass-toolkit in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PASS_CACHE") or Path(base) / "pass-toolkit")


class HashCache:
    """HASHES_FILE, read once; empty if it cannot be read."""

    def __init__(self) -> None:
        self._cached: dict[str, str] = {}
        self._new: dict[str, str] = {}
        # no file, no home directory, or not text
        with suppress(OSError, RuntimeError, ValueError):
            for line in (cache_directory() / HASHES_FILE).read_text(encoding="ascii").splitlines():
                identity, _, sha256 = line.rpartition(" ")
                self._cached[identity] = sha256

    def matches(self, path: Path, sha256: str, compute: Callable[[Path], str]) -> bool:
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
        """Add the new hashes to HASHES_FILE, which others may have changed."""
        if not self._new:
            return
        merged = HashCache()._cached | self._new
        newest = [*merged.items()][-MAX_CACHED_HASHES:]
        lines = [f"{identity} {sha256}\n" for identity, sha256 in newest]
        with suppress(OSError, RuntimeError, PassError):  # The next check reads the files again.
            cache_directory().mkdir(parents=True, exist_ok=True)
            write_whole(cache_directory() / HASHES_FILE, "".join(lines))


def identities(bundle: Path) -> dict[str, str]:
    """Return, by file, numbers that change with its content."""
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
    """Raise PassError unless every used file is listed, and every listed one is as it was
    exported."""
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
    if hash_cache is not None:
        return hash_cache.matches(path, sha256, _sha256)
    return _sha256(path) == sha256


def _sha256(path: Path) -> str:
    return file_info(path).sha256


def file_info(path: Path) -> FileInfo:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
    return FileInfo(sha256=digest.hexdigest(), bytes=size)
