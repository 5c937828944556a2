"""Answers the lines of a batch with a session, and replaces the session if it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pass_runtime.cli.flags import CONSTRAINT_FIELDS, as_constraint
from pass_runtime.cli.prompt_io import checked_messages
from pass_runtime.errors import PassError
from pass_runtime.files import Line, to_json
from pass_runtime.generation import Generation
from pass_runtime.options import REQUEST_OPTIONS, GenerateOptions
from pass_runtime.session import Session

MAX_FAILED_SESSIONS = 3
"""The run ends when this many sessions in a row have failed."""
LINE_FIELDS = ("id", "prompt", "messages", *REQUEST_OPTIONS, *CONSTRAINT_FIELDS)


def line_options(
    line: Mapping[str, Any], defaults: GenerateOptions, number: int
) -> GenerateOptions:
    """Return the options of the request in line `number`, from 1. The line's fields override
    `defaults`; its seed is by default theirs + number - 1."""
    fields = {name: value for name, value in line.items() if value is not None}
    for name in ("id", "prompt", "messages"):
        fields.pop(name, None)
    for name in fields:
        if name not in LINE_FIELDS:
            raise PassError(f"there is no field {name!r}; pass-run batch --help lists the fields")
    constraint = {name: fields.pop(name) for name in CONSTRAINT_FIELDS if name in fields}
    if constraint:
        fields["constraint"] = as_constraint(constraint)
    if isinstance(biases := fields.get("logit_bias"), dict):
        fields["logit_bias"] = {_token_id(key): bias for key, bias in biases.items()}
    return defaults.with_fields(**{"seed": (defaults.sampling.seed or 0) + number - 1} | fields)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise PassError(f"logit_bias: {key!r} is not a token id") from None


class LineGeneration:
    """The generation for a line. Any failure becomes the line's result."""

    def __init__(self, session: Session, line: Line, defaults: GenerateOptions) -> None:
        self.session = session
        self._id: dict[str, Any] = {}
        self._generation: Generation | Exception
        try:
            value = line.object()
            self._id = {"id": value["id"]} if "id" in value else {}
            options = line_options(value, defaults, line.number)
            prompt, messages = value.get("prompt"), value.get("messages")
            if (prompt is None) == (messages is None):
                raise PassError('a request needs "prompt" or "messages", and not both')
            if messages is not None:
                self._generation = session.chat(checked_messages(messages), options)
            elif isinstance(prompt, str):
                self._generation = session.generate(prompt, options)
            else:
                raise PassError("prompt must be a string")
        except Exception as error:
            self._generation = error

    def wait(self) -> dict[str, Any]:
        """Return the fields of the result: "error" of a failure, and "unexpected" if it is not the
        request's fault. The line's "id" comes first."""
        try:
            if isinstance(self._generation, Exception):
                raise self._generation
            result = self._generation.result().as_dict()
            to_json(result)  # fails here, and not later, if JSON cannot hold the result
        except PassError as error:
            result = {"error": _one_line(error)}
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {_one_line(error)}", "unexpected": True}
        return self._id | result


def results_of(
    open_session: Callable[[], Session], lines: Sequence[Line], defaults: GenerateOptions
) -> Iterator[dict[str, Any]]:
    """Yield the results of all lines, in order. Two lines per slot are submitted ahead.

    A pass or a session that fails ends all its sequences, and any of them may be the cause. So a
    line with an unexpected error is answered again, alone, in a session that works.
    """
    if not lines:
        return
    session, failed_sessions = open_session(), 0
    waiting, submitted = iter(lines), deque[LineGeneration]()
    for line in lines:
        count = 2 * session.backend.capabilities.slots - len(submitted)
        submitted.extend(LineGeneration(session, each, defaults) for each in islice(waiting, count))
        generation = submitted.popleft()
        result = generation.wait()
        if "unexpected" in result or ("error" in result and generation.session.closed):
            for other in submitted:
                other.wait()  # so that this line runs alone
            session = _reopen_if_closed(session, open_session)
            result = LineGeneration(session, line, defaults).wait()
            failed_sessions = failed_sessions + 1 if session.closed else 0
            if failed_sessions == MAX_FAILED_SESSIONS:
                raise PassError(
                    f"the session failed {MAX_FAILED_SESSIONS} times in a row, the last time at "
                    f"line {line.number}: {result['error']}; results so far are kept, run again to "
                    "continue"
                )
            session = _reopen_if_closed(session, open_session)
        yield result


def _reopen_if_closed(session: Session, open_session: Callable[[], Session]) -> Session:
    if not session.closed:
        return session
    session.close()
    return open_session()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
