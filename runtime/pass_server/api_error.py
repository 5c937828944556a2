"""The errors that clients get over HTTP and from Triton, in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from pass_runtime import ConstraintStopped, PassError, QueueFull, TooManyConstraints

log = logging.getLogger("pass_server")
MAX_MESSAGE_CHARS = 600
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def shortened(text: str) -> str:
    """Return `text`, without its middle if it is too long."""
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    gap, half = " ... ", MAX_MESSAGE_CHARS // 2
    return f"{text[:half]}{gap}{text[len(gap) - half :]}"


class ApiError(Exception):
    """The error that a client gets. param: the path of the field at fault, such as
    `messages.0.content`. code: OpenAI's name of the error."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param = shortened(message), None if param is None else shortened(param)
        self.status, self.code = status, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        error_type = _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        fields = {"message": self.message, "type": error_type}
        return {"error": {**fields, "param": self.param, "code": self.code}}


def as_api_error(error: BaseException) -> ApiError:
    """Return what the client gets if its request ends with `error`. The client learns nothing about
    a bug, which is logged."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than this server allows", 504, code="timeout")
    if isinstance(error, QueueFull | TooManyConstraints):
        message = f"{error.reason}; try again later" if isinstance(error, QueueFull) else str(error)
        return ApiError(message, 429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ConstraintStopped) or isinstance(error.__cause__, ConstraintStopped):
        return ApiError(str(error), code="constraint_too_complex")
    if isinstance(error, PassError):
        return ApiError(str(error), 500)
    log.error("a request failed", exc_info=error)
    return ApiError("internal error", 500)


def not_supported(param: str, value: Any, why: str = "") -> ApiError:
    """Return the error for a value that this server does not support. why: the reason."""
    quoted = value if isinstance(value, int | float | bool) else "with this value"
    message = f"{param} {quoted} is not supported by this server" + (f": {why}" if why else "")
    return ApiError(message, param=param, code=UNSUPPORTED)


def unknown_field(param: str) -> ApiError:
    message = f"unknown field: {param}; this server ignores no field, so leave it out"
    return ApiError(message, param=param, code="unknown_parameter")


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down", 503, code="shutting_down", headers={"Retry-After": "5"}
    )


UNSUPPORTED = "unsupported_parameter"
"""The type of pydantic's error for a field that is not supported, whose context says why."""
_UNION_TAGS = ("str", "constrained-str", "int", "float", "bool")
"""Members of unions, which pydantic adds to the path of an error; other names have a bracket."""


def validation_error(
    error: ValidationError, named: Callable[[str], str] = lambda path: path
) -> ApiError:
    """Return the error for the first problem that pydantic found. named: returns the path that the
    client knows."""
    problem = error.errors(include_url=False, include_input=False)[0]
    path = [part for part in problem["loc"] if "[" not in str(part) and part not in _UNION_TAGS]
    # pydantic also adds the role of a message or the type of an item.
    if len(path) > 2 and path[0] in ("messages", "input") and isinstance(path[1], int):
        del path[2]
    if problem["type"] == UNSUPPORTED:
        context = problem["ctx"]
        param = ".".join(map(str, [*path, context["field"]]))
        return not_supported(named(param), context["value"], context["why"])
    param = named(".".join(map(str, path)))
    if problem["type"] == "extra_forbidden":
        return unknown_field(param)
    if not param:
        return ApiError(f"the body must be a JSON object: {problem['msg']}")
    return ApiError(f"{param}: {problem['msg']}", param=param, code=problem["type"])
