"""pass-run batch: answers a .jsonl file of requests, and continues a run that was killed.

Every result is on disk before the next. Its fingerprint of request, flags and bundle keeps a run
from continuing the results of another.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, Manifest
from pass_runtime.bundle.read import read_manifest
from pass_runtime.cli import flags as opts
from pass_runtime.cli.batch_session import LINE_FIELDS, results_of
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.commands.errors import OneLineCommand, one_line_errors, require
from pass_runtime.errors import PassError
from pass_runtime.files import Line, open_locked, read_text, replacing, to_json
from pass_runtime.options import MAX_SLOTS, GenerateOptions, LoadOptions
from pass_runtime.session import Session

STDOUT = Path("-")
RESULT_PREFIX = b'{"line": '


@dataclass
class Tally:
    """Counts results, errors, and errors that are not the request's fault."""

    results: int = 0
    failed: int = 0
    unexpected: int = 0

    def count(self, result: Collection[str]) -> None:
        self.results += 1
        self.failed += "error" in result
        self.unexpected += "unexpected" in result


def run_batch(
    requests: Path,
    results: Path,
    defaults: GenerateOptions,
    model: str,
    open_session: Callable[[], Session],
    *,
    retry_failed: bool = False,
) -> Tally:
    """Answer the lines of `requests` that have no result yet; with `retry_failed` also those whose
    result is an error. model: from `model_identity`. open_session: called if a line is answered."""
    lines = {_fingerprint(model, defaults, line): line for line in read_lines(requests)}
    tally = Tally()
    with closing(ResultFile(results, lines)) as file:
        if retry_failed and not file.resumable:
            raise PassError(
                f"--retry-failed reads the results of an earlier run: {results} is no regular file"
            )
        earlier = file.resume()
        kept = {k: names for k, names in earlier.items() if not (retry_failed and "error" in names)}
        keys_to_do = [key for key in lines if key not in kept]
        if earlier:
            last_answered = max(lines[key].number for key in earlier)
            last = max(line.number for line in lines.values())
            repeated = len(earlier) - len(kept)
            note = f", doing {repeated} failed ones again" if repeated else ""
            click.echo(f"continuing after line {last_answered} of {last}{note}", err=True)
        for names in kept.values():
            tally.count(names)

        def open_same() -> Session:
            session = open_session()
            bundle = session.backend.bundle
            if model_identity(bundle, session.manifest) == model:
                return session
            session.close()
            raise PassError(
                f"{bundle} has changed since this run began: put the first bundle back and run "
                "again to continue, or name another file for the results"
            )

        new_results = results_of(open_same, [lines[key] for key in keys_to_do], defaults)
        console = Console(stderr=True)
        shows_progress = bool(keys_to_do) and console.is_terminal
        keys = track(keys_to_do, "batch", console=console) if shows_progress else keys_to_do
        try:
            for key, result in zip(keys, new_results, strict=True):
                file.append(key, {"line": lines[key].number, "request": key, **result})
                tally.count(result)
        finally:
            file.sort()
    note = f', {tally.failed} failed (see their "error")' if tally.failed else ""
    place = "standard output" if results == STDOUT else results
    click.echo(f"{tally.results} results in {place}{note}", err=True)
    return tally


def _fingerprint(model: str, defaults: GenerateOptions, line: Line) -> str:
    parts = f"{model}\n{defaults}\n{line.number}\n{line.text}"
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


class ResultFile:
    """The output of a batch. A regular file can be continued (`resumable`), and is locked against
    other runs; a pipe, a terminal or a device can only be appended to."""

    def __init__(self, path: Path, fingerprints: Collection[str]) -> None:
        """fingerprints: of all requests, in their order."""
        self._path, self._fingerprints = path, fingerprints
        self._spans = dict[str, tuple[int, int]]()  # offset and length of each newest result
        self._end = 0  # the length of the file
        self.resumable = path != STDOUT and (path.is_file() or not path.exists())
        if path == STDOUT and sys.stdout is None:
            raise PassError("standard output is closed: name a file for the results")
        try:
            if path == STDOUT:
                self._fd = os.dup(sys.stdout.fileno())
            else:
                self._fd = open_locked(path) if self.resumable else os.open(path, os.O_WRONLY)
        except BlockingIOError:
            raise PassError(
                f"another run is writing {path}; wait for it, or choose another name"
            ) from None
        except OSError as error:
            raise PassError(f"cannot write {path}: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._fd)

    def resume(self) -> dict[str, set[str]]:
        """Return the names of the results' fields by fingerprint, and remove an incomplete last
        line. Raises PassError if a line is no result of these requests."""
        earlier = dict[str, set[str]]()
        if not self.resumable:
            return earlier
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for line in file:
                if line.endswith(b"\n"):
                    result = _parse(line)
                    key = str(result.get("request"))
                    is_ours = key in self._fingerprints
                    earlier[key] = set(result)
                    self._record(key, len(line))
                else:
                    is_ours = line.startswith(RESULT_PREFIX[: len(line)])
                if not is_ours:
                    raise PassError(
                        f"{self._path} holds results of other requests or flags, or of another "
                        "bundle; remove it, or choose another name"
                    )
        try:
            os.ftruncate(self._fd, self._end)
        except OSError as error:
            raise self._failure(error) from None
        return earlier

    def append(self, key: str, result: dict[str, Any]) -> None:
        """Append a result. In a regular file it is then on disk."""
        line = to_json(result).encode() + b"\n"
        unwritten = memoryview(line)
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._fd, unwritten) :]
            self._record(key, len(line))
            if self.resumable:
                os.fsync(self._fd)
        except OSError as error:
            if self._path == STDOUT or isinstance(error, BrokenPipeError):
                raise  # `one_line_errors` reports it, or ends the command quietly
            raise self._failure(error) from None

    def sort(self) -> None:
        """Put the newest result of each request in the order of the requests."""
        spans = [self._spans[key] for key in self._fingerprints if key in self._spans]
        if spans == sorted(spans) and sum(length for _, length in spans) == self._end:
            return
        with replacing(self._path) as file:
            for start, length in spans:
                file.write(os.pread(self._fd, length, start))

    def _record(self, key: str, length: int) -> None:
        self._spans[key] = self._end, length
        self._end += length

    def _failure(self, error: OSError) -> PassError:
        advice = "; run again to continue" if self.resumable else ""
        return PassError(f"cannot write {self._path}: {error.strerror}{advice}")


def model_identity(bundle: Path, manifest: Manifest) -> str:
    """Return a hash of what decides what a bundle writes."""
    # Only the default template is ever used, since lines have no tools.
    file, model = bundle / CHAT_TEMPLATE_FILES["default"], manifest.model
    template = read_text(file) if file.is_file() else ""
    tokens = (model.bos_token_id, model.eos_token_ids, model.special_tokens)
    parts = (manifest.content_hash, manifest.rule, *tokens, template)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _parse(line: bytes) -> dict[str, Any]:
    try:
        result = json.loads(line)
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


@click.command(
    cls=OneLineCommand,
    epilog="Fields: " + ", ".join(LINE_FIELDS) + ".",
)
@opts.BUNDLE
@click.argument("requests", type=opts.PATH)
@click.argument("results", type=opts.PATH)
@opts.generation_options
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Line n is sampled with this seed + n - 1.",
)
@opts.LOGPROBS
@opts.load_flags("max_batch_size", "speculative_max_concurrency", "prefix_cache", "logprobs_mode")
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Answer the lines again whose result in RESULTS is an error.",
)
@click.option("--fail-on-error", is_flag=True, help="End with status 1 if any line failed.")
@one_line_errors
def batch(
    bundle: Path,
    requests: Path,
    results: Path,
    retry_failed: bool,
    fail_on_error: bool,
    **options: Any,
) -> None:
    """Answer every line of a .jsonl file, several together, with results in order. A run that was
    stopped goes on if it is started again.

    A line is {"prompt": text} or {"messages": [...]}, with any of the fields below, which override
    the flags. "json_schema" and "grammar" are the schema and the grammar, not names of files.

    If a line fails, its result has an "error", and the other lines are answered. The status is 1 if
    an error is not the line's fault ("unexpected": true), or, with --fail-on-error, if there is any
    error.

    `-` is standard input or standard output. Results that go to a pipe or a device cannot be
    continued. "line" in a result is the number of the line in REQUESTS, blank lines counted.
    """
    require("cpu")
    request = opts.generate_options(options)
    # `results_of` submits two lines per slot.
    loading = LoadOptions(**options, max_queue=2 * MAX_SLOTS)
    model = model_identity(bundle, read_manifest(bundle))
    tally = run_batch(
        requests,
        results,
        request,
        model,
        lambda: opts.open_bundle(bundle, loading),
        retry_failed=retry_failed,
    )
    if tally.unexpected or (tally.failed and fail_on_error):
        sys.exit(1)
