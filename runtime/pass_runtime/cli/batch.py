"""pass-run batch: a .jsonl of requests to a .jsonl of results, line for line, resumable.

Results are appended as they are done, each line flushed to disk. A run that was killed continues behind the last
whole line; a torn last line is dropped and done again. Every result carries a fingerprint of its request and the
flags, so that a run never continues another one's results.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.progress import track

from pass_runtime.errors import PassError
from pass_runtime.files import read_text
from pass_runtime.session import GenerateOptions, Session
from pass_runtime.text.stream import Generation

LINE_START = b'{"line": '


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str


class BatchRequest(BaseModel):
    """One line of the input: a prompt or a conversation, and options in place of the flags."""

    model_config = ConfigDict(extra="forbid", strict=True)
    id: Any = None
    prompt: str | None = None
    messages: list[Message] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    plan: str | None = None
    lookahead: int | None = None
    draft: str | None = None
    ignore_eos: bool | None = None

    def options(self, defaults: GenerateOptions, number: int) -> GenerateOptions:
        """The flags with this line's own values; line `number` has its own seed."""
        own = self.model_dump(exclude_none=True, exclude={"id", "prompt", "messages"})
        if "stop" in own:
            own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
        sampling = {key: own.pop(key) for key in ("temperature", "top_k", "top_p", "seed") if key in own}
        sampling.setdefault("seed", defaults.sampling.seed + number - 1)
        return dataclasses.replace(defaults, sampling=dataclasses.replace(defaults.sampling, **sampling), **own)


def run_batch(open_session: Callable[[], Session], requests: Path, results: Path, defaults: GenerateOptions) -> None:
    """Answer the lines of `requests` that `results` does not have yet. Failures are recorded on their line."""
    lines = _read_lines(requests)
    prints = [_fingerprint(line, defaults) for line in lines]
    done = _resume(results, prints)
    if done:
        click.echo(f"continuing after line {done} of {len(lines)}", err=True)
    if done < len(lines):
        session = open_session()
        console = Console(stderr=True)
        left = range(done, len(lines))
        for i in track(left, "batch", console=console) if console.is_terminal else left:
            answer = {"line": i + 1, "request": prints[i], **_answer(session, i + 1, lines[i], defaults)}
            _append(results, json.dumps(answer, ensure_ascii=False) + "\n")
    failed = sum("error" in json.loads(line) for line in _read_lines(results))
    note = f', {failed} failed (see their "error")' if failed else ""
    click.echo(f"{len(lines)} results in {results}{note}", err=True)


def _answer(session: Session, number: int, line: str, defaults: GenerateOptions) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    try:
        request = _parse(line)
        if request.id is not None:
            answer["id"] = request.id
        options = request.options(defaults, number)
        generation = _start(session, request, options).run()
    except PassError as error:
        return answer | {"error": str(error)}
    return answer | {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "seed": options.sampling.seed,
        "stats": generation.stats.as_dict(),
    }


def _parse(line: str) -> BatchRequest:
    try:
        request = BatchRequest.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise PassError(f"{where}: {problem['msg']}" if where else problem["msg"]) from None
    if (request.prompt is None) == (request.messages is None):
        raise PassError('a request needs either "prompt" or "messages"')
    return request


def _start(session: Session, request: BatchRequest, options: GenerateOptions) -> Generation:
    if request.prompt is not None:
        return session.generate(request.prompt, options)
    return session.chat([message.model_dump() for message in request.messages or ()], options)


def _read_lines(path: Path) -> list[str]:
    return [line for line in read_text(path).split("\n") if line.strip()]


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise PassError(f"cannot write {path}: {error.strerror}; run again to continue") from None


def _fingerprint(line: str, defaults: GenerateOptions) -> str:
    """Of a request and the flags."""
    return hashlib.sha256(f"{defaults}\n{line}".encode()).hexdigest()[:16]


def _resume(results: Path, prints: list[str]) -> int:
    """How many results are there already; leaves `results` ending in a whole line."""
    try:
        results.touch()
        data = results.read_bytes()
        whole, torn = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
        there = [_print_of(line) for line in whole.splitlines()]
        # A torn line must at least begin as our results do: anything else is somebody's file.
        if there != prints[: len(there)] or not (torn.startswith(LINE_START) or LINE_START.startswith(torn)):
            raise PassError(f"{results} holds results of other requests or flags; remove it, or choose another name")
        os.truncate(results, len(whole))
    except OSError as error:
        raise PassError(f"cannot write {results}: {error.strerror}") from None
    return len(there)


def _print_of(line: bytes) -> str | None:
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    return answer.get("request") if isinstance(answer, dict) else None
