from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    own = factory.getbasetemp()
    folder = (own.parent if own.name.startswith("popen-") else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """The first caller of all workers makes `path`, while the others wait."""
    with path.with_name(f"{path.name}.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.seek(0)
        if not lock.read():
            make(path)
            lock.write("made")
    return path
