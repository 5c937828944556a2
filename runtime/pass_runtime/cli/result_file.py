"""The output of a batch: a file, which a later run can continue, or a pipe, terminal or device, which it cannot."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from pass_runtime.errors import PassError
from pass_runtime.files import open_locked, replacing, to_json

LINE_START = b'{"line": '
STDOUT = Path("-")


def encode(result: dict[str, Any]) -> bytes:
    return to_json(result).encode() + b"\n"


def can_resume(path: Path) -> bool:
    """Whether what was written to `path` can be read again: a regular file, or nothing yet."""
    return path != STDOUT and (path.is_file() or not path.exists())


class ResultStream:
    """Writes results to `path`, which is no regular file, or for `-` to standard output, and flushes each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = _open_stream(path)
        except OSError as error:
            raise PassError(f"cannot write {path}: {error.strerror}") from None

    def append(self, result: dict[str, Any]) -> None:
        try:
            self._file.write(encode(result))
            self._file.flush()
        except OSError as error:
            if self._path == STDOUT or isinstance(error, BrokenPipeError):
                raise  # `one_line_errors` knows how to end then
            raise PassError(f"cannot write {self._path}: {error.strerror}") from None


class ResultFile:
    """Results on disk, locked against a second run while this process has the file open.

    The operating system holds the lock on the file itself and releases it when the process ends, however that happens.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = open_locked(path)
        except BlockingIOError:
            raise PassError(f"another run is writing {path}; wait for it, or choose another name") from None
        except OSError as error:
            raise PassError(f"cannot write {path}: {error.strerror}") from None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def resume(self, fingerprints: Sequence[str]) -> list[dict[str, Any]]:
        """For every result in the file a dict with its "error" and "unexpected", empty for one that is no error. A torn
        last line is removed.

        PassError where the results are not those of the requests with these fingerprints.
        """
        failed: list[dict[str, Any]] = []
        end, ours = 0, True
        for line in self._lines():
            if line.endswith(b"\n"):
                answer = _parse(line)
                ours &= len(failed) < len(fingerprints) and answer.get("request") == fingerprints[len(failed)]
                failed.append({key: answer[key] for key in ("error", "unexpected") if key in answer})
                end += len(line)
            else:  # torn: a result at least begins like this, and anything else is another program's file
                ours &= line.startswith(LINE_START) or LINE_START.startswith(line)
            if not ours:
                raise PassError(
                    f"{self._path} holds results of other requests or flags, or of another bundle; "
                    "remove it, or choose another name"
                )
        try:
            os.ftruncate(self._fd, end)
        except OSError as error:
            raise self._failure(error) from None
        return failed

    def append(self, result: dict[str, Any]) -> None:
        """Append a result, which is on disk when this returns."""
        data = memoryview(encode(result))
        try:
            while data:
                data = data[os.write(self._fd, data) :]
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from None

    def replace_failed(self, again: Iterator[dict[str, Any]]) -> None:
        """Replace the errors by the results of `again`, in order, in a new file that replaces this one.

        Where `again` raises, the results that it gave until then are kept, and so are the errors that are left.
        """
        stopped: BaseException | None = None
        with replacing(self._path) as file:
            written = 0
            for line in self._lines():
                try:
                    if stopped is None and "error" in _parse(line):
                        line = encode(next(again))
                    _write(file, line)
                except BaseException as error:  # above all Ctrl-C, which may come in the middle of a line
                    if stopped is not None:
                        raise
                    stopped = error
                    file.seek(written)
                    file.truncate()
                    _write(file, line)
                written += len(line)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new = os.dup(file.fileno())  # shares the lock, and the position after the last line
        os.close(self._fd)
        self._fd = new
        if stopped is not None:
            raise stopped

    def _lines(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            yield from file

    def _failure(self, error: OSError) -> PassError:
        return PassError(f"cannot write {self._path}: {error.strerror}; run again to continue")


def _write(file: IO[bytes], line: bytes) -> None:
    file.write(line)
    file.flush()


def _open_stream(path: Path) -> IO[bytes]:
    if path == STDOUT:
        if sys.stdout is None:
            raise PassError("standard output is closed: name a file for the results")
        return sys.stdout.buffer
    return path.open("wb", buffering=0)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
