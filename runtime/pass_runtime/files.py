"""Reading and writing what a user names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pass_runtime.errors import PassError


def read_text(path: Path) -> str:
    """A UTF-8 text file, with or without a byte order mark; PassError where it cannot be read or is something else."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Whoever reads `path` finds the old file or the new one. PassError where it fails."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and vanishes where it fails.

    It is written beside and renamed; links are followed. Devices and pipes cannot be replaced: they are written to.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        part = target.with_name(f".{target.name}.part-{os.getpid()}")
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PassError(f"cannot write {path}: {error.strerror}") from None
