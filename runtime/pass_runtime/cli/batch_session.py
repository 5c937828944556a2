"""The lines of a batch: their fields, and their results from a session that is opened again if it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pass_runtime.bundle.request_fields import REQUEST_FIELDS, RequestField
from pass_runtime.cli.flags import CONSTRAINT, as_constraint
from pass_runtime.errors import PassError
from pass_runtime.files import Line, to_json
from pass_runtime.generation import Generation
from pass_runtime.options import GenerateOptions
from pass_runtime.session import Session
from pass_runtime.text.chat_template import TextMessage

TYPES: dict[str, Any] = {
    **{"number": float, "whole": int, "flag": bool, "text": str, "texts": list[str], "stops": str | list[str]},
    **{"ids": list[int], "biases": dict[str, float]},
}
"""The type of a line's value, by the kind of a field."""


def line_model(fields: Iterable[RequestField]) -> type[BaseModel]:
    """The schema of these fields in a line. None is the flag's value."""
    config = ConfigDict(extra="forbid", strict=True)
    types: dict[str, Any] = {field.name: (TYPES[field.kind] | None, None) for field in fields}
    return create_model("LineFields", __config__=config, **types)


class BatchRequest(line_model(REQUEST_FIELDS)):  # type: ignore[misc]
    """A prompt or a conversation. All other fields but `id` are of GenerateOptions, SamplingParams and Constraint, and
    override the flags."""

    id: Any = None
    prompt: str | None = None
    messages: list[TextMessage] | None = None
    json_schema: dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def options(self, defaults: GenerateOptions, number: int) -> GenerateOptions:
        """The flags, overridden by this line's values. A line without a seed of its own has seed + number - 1."""
        own = self.model_dump(exclude_none=True, exclude={"id", "prompt", "messages"})
        if "logit_bias" in own:
            own["logit_bias"] = {_token(token): bias for token, bias in own["logit_bias"].items()}
        constraint = {key: own.pop(key) for key in CONSTRAINT if key in own}
        if constraint:
            own["constraint"] = as_constraint(constraint)
        return defaults.with_fields(**{"seed": (defaults.sampling.seed or 0) + number - 1} | own)


def _token(written: str) -> int:
    """The token id that a key of logit_bias spells."""
    try:
        return int(written)
    except ValueError:
        raise PassError(f"logit_bias: {written!r} is not a token id") from None


def parse_line(value: dict[str, Any]) -> BatchRequest:
    """PassError names the first field that is wrong."""
    try:
        request: BatchRequest = BatchRequest.model_validate(value)
    except ValidationError as error:
        raise PassError(first_problem(error)) from None
    if (request.prompt is None) == (request.messages is None):
        raise PassError('a request needs either "prompt" or "messages"')
    return request


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, in one line."""
    problem = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}" if where else problem["msg"]


MAX_FAILED_SESSIONS = 3
"""The run ends when this many sessions in a row have failed."""


class LineGeneration:
    """A session answers one line. Whatever goes wrong becomes the error of this line."""

    def __init__(self, session: Session, line: Line, defaults: GenerateOptions) -> None:
        self.session = session
        self._own_id: dict[str, Any] = {}
        self._generation: Generation | Exception
        try:
            value = line.object()
            self._own_id = {"id": value["id"]} if "id" in value else {}
            request = parse_line(value)
            options = request.options(defaults, line.number)
            if request.messages is None:
                self._generation = session.generate(request.prompt or "", options)
            else:
                self._generation = session.chat([message.plain() for message in request.messages], options)
        except Exception as error:
            self._generation = error

    def wait(self) -> dict[str, Any]:
        """The result, or "error"; with "unexpected" if the error is not the request's fault; and the line's "id"."""
        try:
            if isinstance(self._generation, Exception):
                raise self._generation
            found = self._generation.result().as_dict()
            to_json(found)  # raises here, in this line, if JSON cannot hold the result
        except PassError as error:
            found = {"error": _one_line(error)}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {_one_line(error)}", "unexpected": True}
        return self._own_id | found


def results_of(
    open_session: Callable[[], Session], lines: Sequence[Line], defaults: GenerateOptions
) -> Iterator[dict[str, Any]]:
    """The result of every line, in order, each as soon as it is there. As many lines are under way as fill the slots
    twice.

    A pass that fails ends all sequences that were in it, and a session that fails (`Session.closed`) ends all there
    are; in neither case is it known which line was the cause. So a line with an unexpected error is answered once more,
    with no other line under way, in a session that works: if that fails too, the line is the cause.
    """
    if not lines:
        return
    session, failed_sessions = open_session(), 0
    todo, under_way = iter(lines), deque[LineGeneration]()
    for line in lines:
        ahead = 2 * session.backend.capabilities.slots - len(under_way)
        under_way.extend(LineGeneration(session, each, defaults) for each in islice(todo, ahead))
        generation = under_way.popleft()
        found = generation.wait()
        if "unexpected" in found or ("error" in found and generation.session.closed):
            for other in under_way:
                other.wait()
            session = _working(session, open_session)
            found = LineGeneration(session, line, defaults).wait()
            failed_sessions = failed_sessions + 1 if session.closed else 0
            if failed_sessions == MAX_FAILED_SESSIONS:
                raise PassError(
                    f"the session failed {MAX_FAILED_SESSIONS} times in a row, the last time at line {line.number}: "
                    f"{found['error']}; results so far are kept, run again to continue"
                )
            session = _working(session, open_session)
        yield found


def _working(session: Session, open_session: Callable[[], Session]) -> Session:
    """The session, or another one if it has failed."""
    if not session.closed:
        return session
    session.close()
    return open_session()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
