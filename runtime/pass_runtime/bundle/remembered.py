"""Hashes of files that were read before, kept in the user's cache directory, because reading a large model takes long.

A file is identified by its device, inode, size, mtime and ctime; no copy and no `touch` can set back the ctime. A file
that changed a moment ago is not remembered, because another change within the same tick of the clock would not show.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pass_runtime.errors import PassError
from pass_runtime.files import write_whole

HASHES_FILE = "hashes.txt"
"""Each line has the numbers that identify a file and its SHA-256, separated by spaces."""
MOST = 4096
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
        lines = [f"{identity} {sha256}\n" for identity, sha256 in known.items()][-MOST:]
        with suppress(OSError, RuntimeError, PassError):  # The files are then read again next time.
            cache_directory().mkdir(parents=True, exist_ok=True)
            write_whole(cache_directory() / HASHES_FILE, "".join(lines))


def _identity(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
