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
from rich.console import Console
from rich.progress import track

from pass_runtime.errors import PassError
from pass_runtime.sampling import SamplingParams
from pass_runtime.session import GenerateOptions, Session
from pass_runtime.text import Generation

SAMPLING_KEYS = {field.name for field in dataclasses.fields(SamplingParams)}
OPTION_KEYS = {"max_new_tokens", "plan", "lookahead", "stop", "ignore_eos"}
REQUEST_KEYS = {"id", "prompt", "messages"} | SAMPLING_KEYS | OPTION_KEYS


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
        with results.open("a", encoding="utf-8") as file:
            for i in track(range(done, len(lines)), "batch", console=console, disable=not console.is_terminal):
                answer = {"line": i + 1, "request": prints[i], **_answer(session, lines[i], defaults)}
                file.write(json.dumps(answer, ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
    failed = sum("error" in json.loads(line) for line in _read_lines(results))
    note = f', {failed} failed (see their "error")' if failed else ""
    click.echo(f"{len(lines)} results in {results}{note}", err=True)


def _answer(session: Session, line: str, defaults: GenerateOptions) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    try:
        request = _parse(line)
        if "id" in request:
            answer["id"] = request["id"]
        generation = _start(session, request, _options(request, defaults)).run()
    except PassError as error:
        return answer | {"error": str(error)}
    return answer | {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "stats": generation.stats.as_dict(),
    }


def _parse(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except json.JSONDecodeError as error:
        raise PassError(f"not JSON: {error}") from None
    if not isinstance(request, dict):
        raise PassError("a request must be a JSON object")
    if unknown := sorted(set(request) - REQUEST_KEYS):
        raise PassError(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(REQUEST_KEYS))}")
    if ("prompt" in request) == ("messages" in request):
        raise PassError('a request needs either "prompt" or "messages"')
    return request


def _options(request: dict[str, Any], defaults: GenerateOptions) -> GenerateOptions:
    sampling = {key: request[key] for key in SAMPLING_KEYS & request.keys()}
    own = {key: request[key] for key in OPTION_KEYS & request.keys()}
    if "stop" in own:
        own["stop"] = (own["stop"],) if isinstance(own["stop"], str) else tuple(own["stop"])
    try:
        return dataclasses.replace(defaults, sampling=dataclasses.replace(defaults.sampling, **sampling), **own)
    except TypeError as error:
        raise PassError(f"a value has the wrong type: {error}") from None


def _start(session: Session, request: dict[str, Any], options: GenerateOptions) -> Generation:
    messages, prompt = request.get("messages"), request.get("prompt")
    if messages is None:
        if not isinstance(prompt, str):
            raise PassError('"prompt" must be text')
        return session.generate(prompt, options)
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise PassError('"messages" must be a list of {"role": text, "content": text}')
    return session.chat(messages, options)


def _read_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PassError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PassError(f"{path} is not UTF-8 text") from None
    return [line for line in text.split("\n") if line.strip()]


def _fingerprint(line: str, defaults: GenerateOptions) -> str:
    """Of a request and the flags; not of the seed, which is random unless it was given."""
    flags = dataclasses.replace(defaults, sampling=dataclasses.replace(defaults.sampling, seed=0))
    return hashlib.sha256(f"{flags}\n{line}".encode()).hexdigest()[:16]


def _resume(results: Path, prints: list[str]) -> int:
    """How many results are there already; leaves `results` ending in a whole line."""
    try:
        results.touch()
        whole = results.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        there = [_print_of(line) for line in whole.splitlines()]
        if there != prints[: len(there)]:
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
