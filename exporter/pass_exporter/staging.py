"""A directory that appears whole or not at all: built beside its destination, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError


@contextmanager
def staged_directory(
    destination: Path,
    *,
    force: bool,
    kind: str = "bundle",
    mark: str = FILE_NAME,
    elsewhere: str = "another --output",
) -> Iterator[Path]:
    """Yields an empty directory that becomes `destination` when the block succeeds; otherwise nothing is left.

    force: replace a directory of the same kind, which one is that has the file `mark`. elsewhere: what names another
    destination.
    """
    destination = destination.absolute()
    _recover(destination)
    _check(destination, force, kind, mark, elsewhere)
    staging = _sibling(destination, "partial", os.getpid())
    try:
        staging.mkdir(parents=True)
        yield staging
        _check(destination, force, kind, mark, elsewhere)
        if destination.exists():
            old = _sibling(destination, "replaced", os.getpid())
            destination.rename(old)
            staging.rename(destination)
            shutil.rmtree(old)
        else:
            staging.rename(destination)
    except OSError as error:
        reason = error.strerror or f"{error} (is the disk full?)"
        raise PassError(f"cannot write {destination}: {reason}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(destination: Path, force: bool, kind: str, mark: str, elsewhere: str) -> None:
    if not destination.exists():
        return
    if not force:
        raise PassError(f"{destination} exists; use --force to replace it, or {elsewhere}")
    if not destination.is_dir() or (any(destination.iterdir()) and not (destination / mark).is_file()):
        raise PassError(f"{destination} is not a {kind}, so --force will not replace it")


def _sibling(destination: Path, kind: str, pid: int | str) -> Path:
    return destination.with_name(f".{destination.name}.{kind}-{pid}")


def _recover(destination: Path) -> None:
    """Put right what a killed export left: a bundle it had set aside goes back, unless a new one stands."""
    for path in _abandoned(destination, "replaced"):
        if destination.exists():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.rename(destination)
    for path in _abandoned(destination, "partial"):
        shutil.rmtree(path, ignore_errors=True)


def _abandoned(destination: Path, kind: str) -> list[Path]:
    """Siblings whose process is gone."""
    found = destination.parent.glob(_sibling(destination, kind, "*").name)
    pids = {path: path.name.rpartition("-")[2] for path in found}
    return [path for path, pid in pids.items() if pid.isdigit() and not Path(f"/proc/{pid}").exists()]
