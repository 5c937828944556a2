"""A directory that appears whole or not at all: built beside its destination, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pass_runtime.errors import PassError
from pass_runtime.manifest import FILE_NAME


@contextmanager
def staged_directory(destination: Path, *, force: bool) -> Iterator[Path]:
    """Yields an empty directory that becomes `destination` when the block succeeds; otherwise nothing is left."""
    destination = destination.absolute()
    _check(destination, force)
    _remove_abandoned(destination)
    staging = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        yield staging
        _check(destination, force)
        if destination.exists():
            old = destination.with_name(f".{destination.name}.replaced-{os.getpid()}")
            destination.rename(old)
            staging.rename(destination)
            shutil.rmtree(old)
        else:
            staging.rename(destination)
    except OSError as error:
        raise PassError(f"cannot write {destination}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check(destination: Path, force: bool) -> None:
    if not destination.exists():
        return
    if not force:
        raise PassError(f"{destination} exists; use --force to replace it, or another --output")
    if not destination.is_dir() or (any(destination.iterdir()) and not (destination / FILE_NAME).is_file()):
        raise PassError(f"{destination} is not a bundle, so --force will not replace it")


def _remove_abandoned(destination: Path) -> None:
    """What a killed export left here earlier."""
    for path in destination.parent.glob(f".{destination.name}.partial-*"):
        pid = path.name.rpartition("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)
