"""Writes a directory atomically: it is built beside its destination, then renamed. A lock lets one
export at a time write there, so partial files are those of killed exports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pass_runtime.bundle.manifest import FILE_NAME
from pass_runtime.errors import PassError
from pass_runtime.files import locked


@contextmanager
def staged_directory(
    destination: Path,
    *,
    force: bool,
    kind: str = "bundle",
    marker_file: str = FILE_NAME,
    alternative: str = "another --output",
) -> Iterator[Path]:
    """Yield an empty directory, renamed to `destination` if the block succeeds, else removed.
    Raises PassError if the destination exists and must not be replaced, is locked, or cannot be
    written.

    force: replace a directory of the same kind, recognised by its `marker_file`. alternative: the
    other name that messages advise.
    """
    destination = destination.resolve()  # the directory that a link leads to is replaced

    def check() -> None:
        _check_replaceable(destination, force, kind, marker_file, alternative)

    check()
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        busy = f"another pass-export is writing {destination}; wait for it, or use {alternative}"
        with locked(_sibling(destination, "lock"), busy):
            _recover(destination)
            check()  # Until the lock was held, another export may have written the destination.
            with _staging(destination) as staging:
                yield staging
                check()  # In the meantime, another program may have.
                _put_in_place(staging, destination)
    except OSError as error:
        reason = error.strerror or f"{error} (is the disk full?)"
        raise PassError(f"cannot write {destination}: {reason}") from None


@contextmanager
def _staging(destination: Path) -> Iterator[Path]:
    staging = _sibling(destination, "partial")
    try:
        staging.mkdir()
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put_in_place(staging: Path, destination: Path) -> None:
    if not destination.exists():
        staging.rename(destination)
        return
    old = _sibling(destination, "replaced")
    destination.rename(old)
    staging.rename(destination)
    shutil.rmtree(old)


def _check_replaceable(
    destination: Path, force: bool, kind: str, marker_file: str, alternative: str
) -> None:
    if not destination.exists():
        return
    if not force:
        raise PassError(f"{destination} exists; use --force to replace it, or {alternative}")
    if not destination.is_dir() or (
        any(destination.iterdir()) and not (destination / marker_file).is_file()
    ):
        raise PassError(f"{destination} is not a {kind}, so --force will not replace it")


def _sibling(destination: Path, suffix: str) -> Path:
    return destination.with_name(f".{destination.name}.{suffix}")


def _recover(destination: Path) -> None:
    """Remove the partial files of a killed export; the old directory is moved back if it was killed
    between the two renames."""
    old = _sibling(destination, "replaced")
    if old.exists() and not destination.exists():
        old.rename(destination)
    for path in (old, _sibling(destination, "partial")):
        shutil.rmtree(path, ignore_errors=True)
