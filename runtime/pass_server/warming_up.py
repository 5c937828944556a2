"""The app that answers while the session opens and warms up: the server is alive, but not ready."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pass_server.api_error import ApiError
from pass_server.middleware import HeadAsGet, RequestTarget, app_path, as_response

RETRY = {"Retry-After": "5", "Connection": "close"}  # a new one may reach the server itself


def warming_up() -> ASGIApp:
    """Return an app that answers `/health` with 200, and everything else with 503."""
    return RequestTarget(HeadAsGet(_answer))


async def _answer(scope: Scope, receive: Receive, send: Send) -> None:
    response: Response
    if app_path(scope) == "/health":
        response = JSONResponse({"status": "ok"}, headers={"Connection": "close"})
    elif app_path(scope) == "/ready":
        response = JSONResponse({"ready": False}, 503, headers=RETRY)
    else:
        response = as_response(
            ApiError(
                "the server is warming up; try again later", 503, code="warming_up", headers=RETRY
            )
        )
    await response(scope, receive, send)
