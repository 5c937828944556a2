"""Reads, replaces and locks files that a user names."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json

from pass_runtime.errors import PassError


def read_text(path: Path) -> str:
    """UTF-8, without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None


def write_whole(path: Path, content: str | bytes) -> None:
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replace `path` by a temporary file when the block ends, but not if it fails. A link's
    target is replaced; devices and pipes are written directly."""
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        temporary = target.with_name(f".{target.name}.part-{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except BrokenPipeError:  # not an error: the reader wants no more
        raise
    except OSError as error:
        raise PassError(f"cannot write {path}: {error.strerror}") from None


def open_locked(path: Path) -> int:
    """Open or create a file, lock it until its descriptor is closed, and return that. Raises
    BlockingIOError if another process holds the lock."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # `path` is another file by now


@contextmanager
def locked(path: Path, busy_message: str, *, wait_seconds: float = 0) -> Iterator[None]:
    """Hold a lock, whose file exists only meanwhile. Raises PassError(busy_message) after
    `wait_seconds`."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fd = open_locked(path)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise PassError(busy_message) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        # before unlocking: afterwards it may be another process's lock
        path.unlink(missing_ok=True)
        os.close(fd)


def to_json(value: object, indent: int | None = None) -> str:
    """Raises PassError for infinity, NaN and too long integers."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError as error:
        raise PassError(f"a number cannot be written as JSON: {error}") from None


@dataclass(frozen=True)
class Line:
    """Of a .jsonl file; `number` counts from 1."""

    number: int
    text: str

    def object(self) -> dict[str, Any]:
        try:
            value = from_json(self.text, allow_inf_nan=False)
        except ValueError as error:
            raise PassError(f"not JSON: {error}") from None
        try:
            to_json(value)  # JSON results cannot hold 1e999, which is read as infinity
        except PassError as error:
            raise PassError(f"{error}; write it as a string") from None
        if not isinstance(value, dict):
            raise PassError("not a JSON object")
        return value


def lines_of(text: str) -> list[Line]:
    """Return lines that are not blank. JSON may contain other line ends than "\n"."""
    return [
        Line(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
