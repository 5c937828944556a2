"""Errors of requests, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

Nothing here depends on an HTTP server: the model for Triton uses it too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pass_runtime import ConstraintStopped, PassError, QueueFull, TooManyConstraints

log = logging.getLogger("pass_server")


MAX_QUOTED = 600
"""The most characters of an error's message, and of the field that it names."""


def bounded(text: str) -> str:
    """`text` without its middle if it is long, as texts may be that quote what a client sent."""
    if len(text) <= MAX_QUOTED:
        return text
    return f"{text[: MAX_QUOTED // 2]} ... {text[5 - MAX_QUOTED // 2 :]}"


class ApiError(Exception):
    """Ends a request with the HTTP status `status`. param: the field at fault. code: the kind of error. Long messages
    and names of fields are shortened."""

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
        self.message, self.param = bounded(message), None if param is None else bounded(param)
        self.status, self.code = status, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_MEMBERS = ("str", "constrained-str", "int", "float", "bool")
"""What pydantic puts into the path of a field that may have several types, besides names with a bracket."""
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


def as_api_error(error: BaseException) -> ApiError:
    """The error that a client gets for something that failed while its request was under way."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than this server allows", 504, code="timeout")
    if isinstance(error, QueueFull):
        return ApiError(f"{error.reason}; try again later", 429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, TooManyConstraints):
        return ApiError(str(error), 429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ConstraintStopped) or isinstance(error.__cause__, ConstraintStopped):
        return ApiError(str(error), code="constraint_too_complex")
    if isinstance(error, PassError):
        return ApiError(str(error), 500)
    log.error("a request failed", exc_info=error)
    return ApiError("internal error", 500)


def not_supported(param: str, value: Any, why: str = "") -> ApiError:
    """The error for a field that is known, with a value that is not honoured."""
    shown = value if isinstance(value, int | float | bool) else "with this value"
    reason = f": {why}" if why else ""
    message = f"{param} {shown} is not supported by this server{reason}"
    return ApiError(message, param=param, code="unsupported_parameter")


def shutting_down() -> ApiError:
    return ApiError("the server is shutting down", 503, code="shutting_down", headers={"Retry-After": "5"})


def of_validation(error: ValidationError) -> ApiError:
    """The error for the first problem that pydantic found."""
    problem = error.errors(include_url=False, include_input=False)[0]
    path = [part for part in problem["loc"] if "[" not in str(part) and part not in _MEMBERS]
    roles = [i for i in range(2, len(path)) if path[i - 2] in ("messages", "input") and isinstance(path[i - 1], int)]
    param = ".".join(str(part) for i, part in enumerate(path) if i not in roles)  # the class of a message or item
    if problem["type"] == "extra_forbidden":
        message = f"unknown field: {param}; this server refuses what it does not know rather than ignore it"
        return ApiError(message, param=param, code="unknown_parameter")
    if not param:
        return ApiError(f"the body must be a JSON object: {problem['msg']}")
    return ApiError(f"{param}: {problem['msg']}", param=param, code=problem["type"])
