"""Files that one run of the tests makes once, for every worker of pytest-xdist."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return the folder of this run that its workers have in common."""
    own = factory.getbasetemp()
    folder = (own.parent if own.name.startswith("popen-") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Return `path`. The first caller of all workers makes it with make(path); the others wait.

    The lock file notes that it is complete: after a failure the next caller makes it again.
    """
    with path.with_name(f"{path.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            make(path)
            lock.write("made")
    return path
