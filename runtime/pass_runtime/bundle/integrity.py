"""Checks that a bundle's files are the ones that were exported, by size and SHA-256.

Reading a large model takes long, so hashes of files that were read before are kept in the user's cache directory. A
file is identified by its device, inode, size, mtime and ctime; no copy and no `touch` can set back the ctime. A file
that changed a moment ago is not remembered, because another change within the same tick of the clock would not show.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, FILE_NAME, TOKENIZER_FILE, FileInfo, Graph, Manifest
from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

HASHES_FILE = "hashes.txt"
"""Each line has the numbers that identify a file and its SHA-256, separated by spaces."""
MAX_REMEMBERED = 4096
"""How many lines are kept: the newest ones."""
SETTLED = 2 * 10**9
"""A file is remembered only when its last change is this many nanoseconds ago; some file systems' clocks are slow."""


def cache_directory() -> Path:
    """PASS_CACHE, else pass-toolkit under the user's cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("PASS_CACHE") or Path(base) / "pass-toolkit")


class Remembered:
    """The hashes that were known when this object was made. Without a usable cache directory there are none."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._new: dict[str, str] = {}
        with suppress(OSError, RuntimeError, ValueError):  # no home, no file, not text
            for line in (cache_directory() / HASHES_FILE).read_text(encoding="ascii").splitlines():
                identity, _, sha256 = line.rpartition(" ")
                self._known[identity] = sha256

    def knows(self, path: Path, sha256: str) -> bool:
        """Whether `path` is remembered to have this hash. Its content is not read."""
        return self._known.get(_identity(path)) == sha256

    def matches(self, path: Path, sha256: str, read: Callable[[Path], str]) -> bool:
        """Whether `path` has this hash. `read` computes it where it is not known."""
        before = _identity(path)
        if self._known.get(before) == sha256:
            return True
        found = read(path)
        status = path.stat()
        if before == _identity(path) and max(status.st_mtime_ns, status.st_ctime_ns) + SETTLED < time.time_ns():
            self._new[before] = found
        return found == sha256

    def save(self) -> None:
        """Write the new hashes, along with those that other processes have written meanwhile."""
        if not self._new:
            return
        known = Remembered()._known | self._new
        lines = [f"{identity} {sha256}\n" for identity, sha256 in known.items()][-MAX_REMEMBERED:]
        with suppress(OSError, RuntimeError, PassError):  # The files are then read again next time.
            cache_directory().mkdir(parents=True, exist_ok=True)
            write_whole(cache_directory() / HASHES_FILE, "".join(lines))


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def verify_files(
    bundle: Path, manifest: Manifest, *, hashes: bool = True, remembered: Remembered | None = None
) -> None:
    """Check that every file of the bundle exists and is the one that was exported.

    remembered: known hashes, so that files that have not changed since are not read again. None reads every file.
    """
    for name, info in manifest.files.items():
        path = bundle / name
        if not path.is_file():
            raise PassError(f"{path} is missing; export the bundle again")
        if path.stat().st_size != info.bytes:
            raise PassError(
                f"{path} has {path.stat().st_size} bytes instead of {info.bytes}; copy or export the bundle again"
            )
        if hashes and not has_hash(path, info.sha256, remembered):
            raise PassError(f"{path} does not match its SHA-256 in {FILE_NAME}; copy or export the bundle again")
    listed = {TOKENIZER_FILE, *(graph.file for graph in _graphs(manifest))}
    listed |= {derived.file for derived in manifest.derived}
    listed |= {file for file in CHAT_TEMPLATE_FILES.values() if (bundle / file).exists()}
    if missing := sorted(listed - set(manifest.files)):
        raise PassError(f"{bundle / FILE_NAME}: {missing[0]} is used but not listed under files")


def has_hash(path: Path, sha256: str, remembered: Remembered | None = None) -> bool:
    """Whether a file has this hash, by its content or by what is remembered of an unchanged file."""
    return _read(path) == sha256 if remembered is None else remembered.matches(path, sha256, _read)


def _read(path: Path) -> str:
    return file_info(path).sha256


def file_info(path: Path, progress: Callable[[int], None] | None = None) -> FileInfo:
    """Size and SHA-256, read in 4 MiB pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            size += len(piece)
            if progress is not None:
                progress(len(piece))
    return FileInfo(sha256=digest.hexdigest(), bytes=size)


def _graphs(manifest: Manifest) -> Iterable[Graph]:
    yield manifest.trunk
    yield manifest.logprobs
    if manifest.processors is not None:
        yield manifest.processors
    for plan in manifest.plans:
        yield from plan.tails.values()
