"""pass-run batch: a .jsonl of requests to a .jsonl of results, line for line, resumable.

Results are appended in the order of the requests, each flushed to disk. A run that was killed continues behind the last
whole line; a torn last line is dropped and done again. Every result carries a fingerprint of its request, the flags and
the bundle, so that a run never continues another one's results.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import track

from pass_runtime.bundle.manifest import CHAT_TEMPLATE_FILE, Manifest
from pass_runtime.cli.batch_request import BatchRequest, parse_request
from pass_runtime.cli.prompts import Line, read_lines
from pass_runtime.cli.result_file import STDOUT, ResultFile, ResultStream, can_resume
from pass_runtime.errors import PassError
from pass_runtime.generation import Generation
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session


@dataclass(frozen=True)
class Job:
    """A request and the fingerprint that its result carries."""

    line: Line
    fingerprint: str


@dataclass
class Tally:
    """How many results a run has, those that were there before included."""

    results: int = 0
    failed: int = 0

    def count(self, *, failed: bool) -> None:
        self.results += 1
        self.failed += failed


class Pending(Protocol):
    """An answer under way."""

    def wait(self) -> dict[str, Any]:
        """The result, or its "error"; with the request's "id" where it has one."""


class Answering(Protocol):
    """Whoever answers lines. ahead: how many are to be under way, so that it always has something to do."""

    ahead: int

    def start(self, line: Line) -> Pending: ...


@dataclass(frozen=True)
class Batch:
    """Requests to answer. open_answering is called once, and only where there is something to do."""

    requests: Path
    results: Path
    defaults: GenerateOptions
    model: str
    """Of `model_identity`."""
    open_answering: Callable[[], Answering]
    retry_failed: bool = False

    def run(self) -> int:
        """Answer what has no result yet, and return the number of errors. Failures are recorded on their line."""
        jobs = [Job(line, self._fingerprint(line)) for line in read_lines(self.requests)]
        if can_resume(self.results):
            with ResultFile(self.results) as file:
                tally = self._continue(jobs, file)
        elif self.retry_failed:
            raise PassError(f"--retry-failed reads the results of an earlier run: {self.results} is no regular file")
        else:
            stream, tally = ResultStream(self.results), Tally()
            for answer in self._answers(jobs, tally):
                stream.append(answer)
        where = "standard output" if self.results == STDOUT else self.results
        note = f', {tally.failed} failed (see their "error")' if tally.failed else ""
        click.echo(f"{tally.results} results in {where}{note}", err=True)
        return tally.failed

    def _continue(self, jobs: list[Job], file: ResultFile) -> Tally:
        there = file.resume([job.fingerprint for job in jobs])
        done = len(there)
        again = [job for job, failed in zip(jobs, there, strict=False) if failed] if self.retry_failed else []
        if done:
            note = f", doing {len(again)} failed ones again" if again else ""
            last = jobs[done - 1].line.number
            click.echo(f"continuing after line {last} of {jobs[-1].line.number}{note}", err=True)
        kept = [failed for failed in there if not (failed and self.retry_failed)]
        tally = Tally(len(kept), sum(kept))
        if again or jobs[done:]:
            answers = self._answers([*again, *jobs[done:]], tally)
            if again:
                file.replace_failed(answers)
            for answer in answers:
                file.append(answer)
        return tally

    def _answers(self, jobs: list[Job], tally: Tally) -> Iterator[dict[str, Any]]:
        """The results of `jobs`, in their order, as they are done."""
        answering, todo = self.open_answering(), iter(jobs)
        under_way = deque((job, answering.start(job.line)) for job in islice(todo, answering.ahead))
        console = Console(stderr=True)
        for _ in track(jobs, "batch", console=console) if console.is_terminal else jobs:
            job, answer = under_way.popleft()
            found = answer.wait()
            under_way += [(job, answering.start(job.line)) for job in islice(todo, 1)]
            tally.count(failed="error" in found)
            yield {"line": job.line.number, "request": job.fingerprint, **found}

    def _fingerprint(self, line: Line) -> str:
        whole = f"{self.model}\n{self.defaults}\n{line.number}\n{line.text}"
        return hashlib.sha256(whole.encode()).hexdigest()[:16]


def model_identity(bundle: Path, manifest: Manifest) -> str:
    """A hash over what decides which text a bundle writes: its files, its chat template, where it ends, its rule."""
    template = bundle / CHAT_TEMPLATE_FILE
    model = manifest.model
    parts = (manifest.content, manifest.rule, model.bos_token_id, model.eos_token_ids, _read(template))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None


class OneSession:
    """Answers with a session: its slots are kept busy, and as many lines again wait."""

    def __init__(self, session: Session, defaults: GenerateOptions) -> None:
        self.ahead = 2 * session.backend.capabilities.slots
        self._session, self._defaults = session, defaults

    def start(self, line: Line) -> Answer:
        return Answer(self._session, line, self._defaults)


class Answer:
    """The answer of a session to one line, under way."""

    def __init__(self, session: Session, line: Line, defaults: GenerateOptions) -> None:
        self._own_id: dict[str, Any] = {}
        self._generation: Generation | PassError
        try:
            value = line.object()
            self._own_id = {"id": value["id"]} if "id" in value else {}
            request = parse_request(value)
            self._generation = _start(session, request, request.options(defaults, line.number))
        except PassError as error:
            self._generation = error

    def wait(self) -> dict[str, Any]:
        try:
            if isinstance(self._generation, PassError):
                raise self._generation
            return self._own_id | self._generation.run().as_dict()
        except PassError as error:
            return self._own_id | {"error": " ".join(str(error).splitlines())}


def _start(session: Session, request: BatchRequest, options: GenerateOptions) -> Generation:
    if request.prompt is not None:
        return session.generate(request.prompt, options)
    return session.chat([message.model_dump() for message in request.messages or ()], options)
