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
    """Return `path`, which the first caller of any worker has made with make(path); the others wait
    for it.

    The lock's file says that it is whole: what a failure left is made again, by the next who asks
    for it.
    """
    with path.with_name(f"{path.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            make(path)
            lock.write("made")
    return path
