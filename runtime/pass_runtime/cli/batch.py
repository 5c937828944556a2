"""pass-run batch: a .jsonl of requests to a .jsonl of results, line for line, resumable.

Results are appended in the order of the requests, each flushed to disk. A run that was killed continues after the last
whole line; a torn last line is removed and answered again. Every result carries a fingerprint of its request, the flags
and the bundle, so that a run never continues the results of another one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILES, Manifest
from pass_runtime.cli.prompt_io import read_lines
from pass_runtime.cli.result_file import STDOUT, ResultFile, ResultStream, can_resume
from pass_runtime.errors import PassError
from pass_runtime.files import Line
from pass_runtime.options import GenerateOptions


@dataclass(frozen=True)
class Job:
    """A request and the fingerprint that its result carries."""

    line: Line
    fingerprint: str


@dataclass
class Tally:
    """The number of results of a run, those of earlier runs that it continues included."""

    results: int = 0
    failed: int = 0
    """How many of them are errors."""
    unexpected: int = 0
    """How many of them are errors that are not the request's fault."""

    def count(self, found: Mapping[str, Any]) -> None:
        self.results += 1
        self.failed += "error" in found
        self.unexpected += "unexpected" in found


class PendingResult(Protocol):
    """The result of a line that is being answered."""

    def wait(self) -> dict[str, Any]:
        """The result, or an "error" in its place; with the request's "id" where it has one."""


class Answerer(Protocol):
    """What answers lines: a session, or the actors of a Ray cluster."""

    @property
    def ahead(self) -> int:
        """How many lines should be under way now to keep it busy."""

    def start(self, line: Line) -> PendingResult: ...


@dataclass(frozen=True)
class Batch:
    """Requests to answer. open_answerer is called once, and only where a line has no result yet."""

    requests: Path
    results: Path
    defaults: GenerateOptions
    model: str
    """What `model_identity` returns."""
    open_answerer: Callable[[], Answerer]
    retry_failed: bool = False

    def run(self) -> Tally:
        """Answer the lines that have no result yet. A failure becomes the result of its line."""
        jobs = [Job(line, self._fingerprint(line)) for line in read_lines(self.requests)]
        if can_resume(self.results):
            with ResultFile(self.results) as file:
                tally = self._continue(jobs, file)
        elif self.retry_failed:
            raise PassError(f"--retry-failed reads the results of an earlier run: {self.results} is no regular file")
        else:
            stream, tally = ResultStream(self.results), Tally()
            for result in self._results(jobs, tally):
                stream.append(result)
        where = "standard output" if self.results == STDOUT else self.results
        note = f', {tally.failed} failed (see their "error")' if tally.failed else ""
        click.echo(f"{tally.results} results in {where}{note}", err=True)
        return tally

    def _continue(self, jobs: list[Job], file: ResultFile) -> Tally:
        there = file.resume([job.fingerprint for job in jobs])
        done = len(there)
        again = [job for job, failed in zip(jobs, there, strict=False) if failed] if self.retry_failed else []
        if done:
            note = f", doing {len(again)} failed ones again" if again else ""
            last = jobs[done - 1].line.number
            click.echo(f"continuing after line {last} of {jobs[-1].line.number}{note}", err=True)
        kept = [failed for failed in there if not (failed and self.retry_failed)]
        tally = Tally()
        for found in kept:
            tally.count(found)
        if again or jobs[done:]:
            results = self._results([*again, *jobs[done:]], tally)
            if again:
                file.replace_failed(results)
            for result in results:
                file.append(result)
        return tally

    def _results(self, jobs: list[Job], tally: Tally) -> Iterator[dict[str, Any]]:
        """The results of `jobs` in their order, each as soon as it is there."""
        answerer, todo = self.open_answerer(), iter(jobs)
        under_way: deque[tuple[Job, PendingResult]] = deque()
        console = Console(stderr=True)
        for _ in track(jobs, "batch", console=console) if console.is_terminal else jobs:
            while len(under_way) < answerer.ahead and (job := next(todo, None)) is not None:
                under_way.append((job, answerer.start(job.line)))
            job, pending = under_way.popleft()
            found = pending.wait()
            tally.count(found)
            yield {"line": job.line.number, "request": job.fingerprint, **found}

    def _fingerprint(self, line: Line) -> str:
        whole = f"{self.model}\n{self.defaults}\n{line.number}\n{line.text}"
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


def model_identity(bundle: Path, manifest: Manifest) -> str:
    """A hash over what decides a bundle's text: its files, chat template, special tokens, and acceptance rule."""
    template = bundle / CHAT_TEMPLATE_FILES["default"]  # lines have no tools
    model = manifest.model
    tokens = (model.bos_token_id, model.eos_token_ids, model.special_tokens)
    parts = (manifest.content, manifest.rule, *tokens, _read(template))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
