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


MAX_MESSAGE_CHARS = 600
"""The most characters of an error's message, and of its param."""


def shortened(text: str) -> str:
    """`text`, without its middle if it is too long: messages may quote what a client sent."""
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    gap = " ... "
    return f"{text[: MAX_MESSAGE_CHARS // 2]}{gap}{text[len(gap) - MAX_MESSAGE_CHARS // 2 :]}"


class ApiError(Exception):
    """The response of a request that fails. status: HTTP's. param: the path of the field at fault.
    code: OpenAI's name of the error. A long message or param is shortened."""

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
        error_type = _ERROR_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        return {
            "error": {
                "message": self.message,
                "type": error_type,
                "param": self.param,
                "code": self.code,
            }
        }


_UNION_TAGS = ("str", "constrained-str", "int", "float", "bool")
"""Types that pydantic adds to the path of an error in a union, as in `stop.constrained-str`; others
have a bracket."""
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def as_api_error(error: BaseException) -> ApiError:
    """The error for the client whose request was ended by `error`, which is logged if it is a
    bug."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than this server allows", 504, code="timeout")
    if isinstance(error, QueueFull):
        return ApiError(
            f"{error.reason}; try again later", 429, code="queue_full", headers={"Retry-After": "1"}
        )
    if isinstance(error, TooManyConstraints):
        return ApiError(str(error), 429, code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, ConstraintStopped) or isinstance(error.__cause__, ConstraintStopped):
        return ApiError(str(error), code="constraint_too_complex")
    if isinstance(error, PassError):
        return ApiError(str(error), 500)
    log.error("a request failed", exc_info=error)
    return ApiError("internal error", 500)


def not_supported(param: str, value: Any, why: str = "") -> ApiError:
    """The error for a known field whose value this server does not support. It quotes numbers and
    booleans only."""
    shown = value if isinstance(value, int | float | bool) else "with this value"
    reason = f": {why}" if why else ""
    message = f"{param} {shown} is not supported by this server{reason}"
    return ApiError(message, param=param, code="unsupported_parameter")


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down", 503, code="shutting_down", headers={"Retry-After": "5"}
    )


def validation_error(error: ValidationError) -> ApiError:
    """The error for the first problem that pydantic found."""
    problem = error.errors(include_url=False, include_input=False)[0]
    path = [part for part in problem["loc"] if "[" not in str(part) and part not in _UNION_TAGS]
    tags = [
        i
        for i in range(2, len(path))
        if path[i - 2] in ("messages", "input") and isinstance(path[i - 1], int)
    ]
    # Tags: "user" in messages.0.user.name.
    param = ".".join(str(part) for i, part in enumerate(path) if i not in tags)
    if problem["type"] == "extra_forbidden":
        message = f"unknown field: {param}; this server ignores no field, so leave it out"
        return ApiError(message, param=param, code="unknown_parameter")
    if not param:
        return ApiError(f"the body must be a JSON object: {problem['msg']}")
    return ApiError(f"{param}: {problem['msg']}", param=param, code=problem["type"])
