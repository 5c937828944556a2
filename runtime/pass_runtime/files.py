"""Reading and writing what a user names."""

from __future__ import annotations

from pathlib import Path

from pass_runtime.errors import PassError


def read_text(path: Path) -> str:
    """A UTF-8 text file; PassError where it cannot be read or is something else."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Written beside and renamed: whoever reads `path` finds the old file or the new one. PassError where it fails."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    except OSError as error:
        raise PassError(f"cannot write {path}: {error.strerror}") from None
