"""Files that a user names: reads text and lines of JSON, replaces files in one step, locks them."""

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
    """Return the text of the UTF-8 file `path`, without a byte order mark. Raises PassError if the
    file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace the file `path` by `content` in one step, as `replacing` does."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file to write. It replaces `path` when the `with` block ends, and is removed
    if the block fails.

    If `path` is a link, the file that it leads to is replaced. Devices and pipes cannot be replaced
    and are written directly. Raises PassError if writing fails.
    """
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
    except BrokenPipeError:  # not an error for a command: the reader wants no more
        raise
    except OSError as error:
        raise PassError(f"cannot write {path}: {error.strerror}") from None


def open_locked(path: Path) -> int:
    """Open the file `path`, which is created if it is missing, and lock it exclusively. Return its
    descriptor; closing that unlocks the file.

    The operating system releases the lock when the process ends, however it ends. The lock also
    works between containers that share a host's volume. Raises BlockingIOError if another process
    holds it.
    """
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
        os.close(fd)  # `path` is no longer the file that was opened and locked: try again.


@contextmanager
def locked(path: Path, busy_message: str, *, wait_seconds: float = 0) -> Iterator[None]:
    """Hold the lock of the file `path` while the block runs; the file exists only for that time.
    Raises PassError(busy_message) if another process still holds the lock after `wait_seconds`, and
    OSError if the file cannot be created."""
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
        # Removed before it is unlocked: afterwards the file may be another process's lock.
        path.unlink(missing_ok=True)
        os.close(fd)


def to_json(value: object, indent: int | None = None) -> str:
    """Return `value` as JSON text. Raises PassError for infinity, NaN, and integers with more
    digits than Python prints."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except ValueError as error:
        raise PassError(f"a number cannot be written as JSON: {error}") from None


@dataclass(frozen=True)
class Line:
    """A line of a .jsonl file. number: the line's number in the file, from 1."""

    number: int
    text: str

    def object(self) -> dict[str, Any]:
        """Return the JSON object in the line. Raises PassError if the line has anything else."""
        try:
            value = from_json(self.text, allow_inf_nan=False)
        except ValueError as error:
            raise PassError(f"not JSON: {error}") from None
        try:
            to_json(value)  # 1e999 is read as infinity, which JSON results cannot hold
        except PassError as error:
            raise PassError(f"{error}; write it as a string") from None
        if not isinstance(value, dict):
            raise PassError("not a JSON object")
        return value


def lines_of(text: str) -> list[Line]:
    """Return the lines of a .jsonl file's text that are not blank. Only "\\n" ends a line, because
    JSON strings may contain other line separators."""
    return [
        Line(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()
    ]
