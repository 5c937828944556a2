"""pass-run batch: a .jsonl of requests to a .jsonl of results, line for line, resumable.

Every result is on disk before the next one is written, and carries a fingerprint of its request, the flags and the
bundle. A run that was killed continues with the lines that have no result yet, and never continues the results of
another run. Results that answer failed lines again stand at the end of the file until the run ends, which sorts it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, Manifest
from pass_runtime.cli.batch_session import results_of
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.errors import PassError
from pass_runtime.files import Line, open_locked, read_text, replacing, to_json
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session

STDOUT = Path("-")
LINE_START = b'{"line": '


@dataclass
class Tally:
    """How many results a run has, those of earlier runs that it continues included. failed: how many of them are
    errors. unexpected: how many of them are errors that are not the request's fault."""

    results: int = 0
    failed: int = 0
    unexpected: int = 0

    def count(self, found: Mapping[str, Any]) -> None:
        self.results += 1
        self.failed += "error" in found
        self.unexpected += "unexpected" in found


def run_batch(
    requests: Path,
    results: Path,
    defaults: GenerateOptions,
    model: str,
    open_session: Callable[[], Session],
    *,
    retry_failed: bool = False,
) -> Tally:
    """Answer the lines of `requests` that have no result yet. A failure becomes the result of its line.

    model: what `model_identity` returns. open_session is called if there is anything to answer. retry_failed: also
    answer lines again whose result is an error.
    """
    lines = {_fingerprint(model, defaults, line): line for line in read_lines(requests)}
    tally = Tally()
    with closing(ResultFile(results, lines)) as file:
        if retry_failed and not file.resumable:
            raise PassError(f"--retry-failed reads the results of an earlier run: {results} is no regular file")
        there = file.resume()
        kept = {key: found for key, found in there.items() if not (retry_failed and "error" in found)}
        todo = [key for key in lines if key not in kept]
        if there:
            last, total = (max(lines[key].number for key in keys) for keys in (there, lines))
            note = f", doing {len(there) - len(kept)} failed ones again" if len(kept) < len(there) else ""
            click.echo(f"continuing after line {last} of {total}{note}", err=True)
        for found in kept.values():
            tally.count(found)
        console = Console(stderr=True)
        keys = track(todo, "batch", console=console) if todo and console.is_terminal else todo
        answers = results_of(open_session, [lines[key] for key in todo], defaults)
        try:
            for key, found in zip(keys, answers, strict=True):
                file.append({"line": lines[key].number, "request": key, **found})
                tally.count(found)
        finally:
            if file.resumable and [*there, *todo] != [*lines]:
                file.sort()
    where = "standard output" if results == STDOUT else results
    note = f', {tally.failed} failed (see their "error")' if tally.failed else ""
    click.echo(f"{tally.results} results in {where}{note}", err=True)
    return tally


def _fingerprint(model: str, defaults: GenerateOptions, line: Line) -> str:
    return hashlib.sha256(f"{model}\n{defaults}\n{line.number}\n{line.text}".encode()).hexdigest()[:16]


class ResultFile:
    """The output of a batch. A regular file is locked against other runs until it is closed or this process ends, and
    can be continued (`resumable`); a pipe, a terminal or a device cannot. The name `-` is standard output.

    order: the fingerprints of all requests.
    """

    def __init__(self, path: Path, order: Collection[str]) -> None:
        self._path, self._order = path, order
        self.resumable = path != STDOUT and (path.is_file() or not path.exists())
        try:
            if path == STDOUT:
                if sys.stdout is None:
                    raise PassError("standard output is closed: name a file for the results")
                self._fd = os.dup(sys.stdout.fileno())
            else:
                self._fd = open_locked(path) if self.resumable else os.open(path, os.O_WRONLY)
        except BlockingIOError:
            raise PassError(f"another run is writing {path}; wait for it, or choose another name") from None
        except OSError as error:
            raise PassError(f"cannot write {path}: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)

    def resume(self) -> dict[str, dict[str, Any]]:
        """The results that are there, by fingerprint: "error" and "unexpected" of each. A torn last line is removed.
        Raises PassError if one is not of these requests."""
        there, end = dict[str, dict[str, Any]](), 0
        for line in self._lines():
            if whole := line.endswith(b"\n"):
                found = _parse(line)
                key = str(found.get("request"))
                there.pop(key, None)  # the error that a killed run answered again
                there[key] = {name: found[name] for name in ("error", "unexpected") if name in found}
                end += len(line)
            # A torn result at least begins like others, and anything else is another program's file.
            if key not in self._order if whole else not (line.startswith(LINE_START) or LINE_START.startswith(line)):
                raise PassError(
                    f"{self._path} holds results of other requests or flags, or of another bundle; "
                    "remove it, or choose another name"
                )
        if self.resumable:
            try:
                os.ftruncate(self._fd, end)
            except OSError as error:
                raise self._failure(error) from None
        return there

    def sort(self) -> None:
        """Replace the file by one whose results are in the order of the requests, without those that were answered
        again later."""
        places, end = dict[str, tuple[int, int]](), 0
        for line in self._lines():
            if line.endswith(b"\n"):
                places[str(_parse(line).get("request"))] = end, len(line)
            end += len(line)
        with replacing(self._path) as file:
            for start, length in (places[key] for key in self._order if key in places):
                file.write(os.pread(self._fd, length, start))

    def append(self, result: dict[str, Any]) -> None:
        """Append a result. In a regular file it is on disk when this returns."""
        left = memoryview(to_json(result).encode() + b"\n")
        try:
            while left:
                left = left[os.write(self._fd, left) :]
            if self.resumable:
                os.fsync(self._fd)
        except OSError as error:
            if self._path == STDOUT or isinstance(error, BrokenPipeError):
                raise  # `one_line_errors` knows how to end then
            raise self._failure(error) from None

    def _lines(self) -> Iterator[bytes]:
        if self.resumable:
            with os.fdopen(os.dup(self._fd), "rb") as file:
                file.seek(0)
                yield from file

    def _failure(self, error: OSError) -> PassError:
        advice = "; run again to continue" if self.resumable else ""
        return PassError(f"cannot write {self._path}: {error.strerror}{advice}")


def model_identity(bundle: Path, manifest: Manifest) -> str:
    """A hash over what decides a bundle's text: its files, chat template, special tokens, and acceptance rule."""
    template = bundle / CHAT_TEMPLATE_FILES["default"]  # lines have no tools
    model = manifest.model
    tokens = (model.bos_token_id, model.eos_token_ids, model.special_tokens)
    parts = (manifest.content, manifest.rule, *tokens, read_text(template) if template.is_file() else "")
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
