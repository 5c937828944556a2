"""The lines of a batch: their fields, and a session that answers them and is opened again if it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


SESSIONS = 3
"""The run ends when this many sessions in a row have failed."""


class LineGeneration:
    """A session answers one line. Whatever goes wrong becomes the error of this line."""

    def __init__(self, session: Session, line: Line, defaults: GenerateOptions) -> None:
        self.session = session
        self._own_id: dict[str, Any] = {}
        self._generation: Generation | Exception
        self._found: dict[str, Any] | None = None
        try:
            value = line.object()
            self._own_id = {"id": value["id"]} if "id" in value else {}
            request = parse_line(value)
            self._generation = _start(session, request, request.options(defaults, line.number))
        except Exception as error:
            self._generation = error

    def wait(self) -> dict[str, Any]:
        """The result, or "error"; with "unexpected" where the error is not the request's fault."""
        if self._found is None:
            self._found = self._own_id | self._end()
        return self._found

    def _end(self) -> dict[str, Any]:
        try:
            if isinstance(self._generation, Exception):
                raise self._generation
            found = self._generation.result().as_dict()
            to_json(found)  # raises here, in this line, where JSON cannot hold the result
        except PassError as error:
            return {"error": _one_line(error)}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {_one_line(error)}", "unexpected": True}
        return found


class SessionAnswerer:
    """An `Answerer` with one session. It keeps as many lines under way as fill its slots twice.

    A pass that fails ends all sequences that were in it, and a session that fails (`Session.closed`) ends all there
    are; in neither case is it known which line was the cause. So a line with an unexpected error is answered once more,
    alone in a session that works: where that fails too, the line is the cause.
    """

    def __init__(self, open_session: Callable[[], Session], defaults: GenerateOptions) -> None:
        self._open, self._defaults = open_session, defaults
        self._session = open_session()
        self._under_way: deque[LineGeneration] = deque()
        self._one_by_one = False
        self._failed = 0

    @property
    def ahead(self) -> int:
        """How many lines should be under way; after a failure, one, until all those under way have ended."""
        return 1 if self._one_by_one else 2 * self._session.backend.capabilities.slots

    def start(self, line: Line) -> PendingLine:
        if self._one_by_one:
            self._one_by_one = False
            self._open_again()
        generation = LineGeneration(self._session, line, self._defaults)
        self._under_way.append(generation)
        return PendingLine(self, line)

    def wait(self, line: Line) -> dict[str, Any]:
        """The result of `line`, which was started first of those under way."""
        generation = self._under_way.popleft()
        found = generation.wait()
        if "unexpected" in found or ("error" in found and generation.session.closed):
            return self._alone(line, found["error"])
        return found

    def _alone(self, line: Line, error: str) -> dict[str, Any]:
        """The result of a line that ended with `error` before, answered with no other line under way."""
        self._one_by_one = True
        for other in self._under_way:
            other.wait()
        self._open_again(error)
        found = LineGeneration(self._session, line, self._defaults).wait()
        self._failed = self._failed + 1 if self._session.closed else 0
        if self._failed == SESSIONS:
            raise PassError(
                f"the session failed {SESSIONS} times in a row, the last time at line {line.number}: "
                f"{found.get('error', error)}; results so far are kept, run again to continue"
            )
        return found

    def _open_again(self, error: str = "") -> None:
        if not self._session.closed:
            return
        self._session.close()
        try:
            self._session = self._open()
        except PassError:
            raise
        except Exception as problem:
            raise PassError(
                f"the session failed ({error}) and cannot be opened again ({type(problem).__name__}: {problem}); "
                "results so far are kept, run again to continue"
            ) from None


@dataclass(frozen=True)
class PendingLine:
    """A line under way. Lines must be waited for in the order in which they were started."""

    answerer: SessionAnswerer
    line: Line

    def wait(self) -> dict[str, Any]:
        return self.answerer.wait(self.line)


def _start(session: Session, request: BatchRequest, options: GenerateOptions) -> Generation:
    if request.prompt is not None:
        return session.generate(request.prompt, options)
    return session.chat([message.plain() for message in request.messages or ()], options)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"
